"""Open-loop controller that grows seeds at fixed intervals: a lower bound for controllers that observe the host."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from esper_lightning.blueprints import suggest_name
from esper_lightning.controllers.fixed_schedule import WAIT_ACTION, is_possible
from esper_lightning.controllers.hill_climbing import fastest_tempo, make_action
from esper_lightning.controllers.learned import Hosts
from esper_lightning.envs import Action, Op
from esper_lightning.envs.spaces.actions import to_action


@dataclass(frozen=True, kw_only=True)
class PeriodicConfig:
    """Interval of germinations, and blueprints to germinate."""

    every: int = 4
    """Ticks from one germination to the next."""

    blueprints: list[str] | None = None
    """Blueprints to germinate in turn. None: all available ones."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"periodic.every must be at least 1, got {self.every}")
        if self.blueprints is not None and not self.blueprints:
            raise ValueError("periodic.blueprints is empty; name at least one, or leave it out for all")


class Periodic:
    """Germinates the next blueprint in the next free slot at fixed intervals, and fossilizes as soon as possible."""

    def __init__(self, config: PeriodicConfig = PeriodicConfig()) -> None:
        self.config = config

    def reset(self, pool: Hosts) -> None:
        available = pool.space.blueprint
        for name in self.config.blueprints or ():
            if name not in available:
                raise ValueError(f"periodic.blueprints: {name!r} is not available; {suggest_name(name, available)}")
        self.blueprints = [available.index(name) for name in self.config.blueprints or available]
        self.tempo, _ = fastest_tempo(pool)
        self.next_germination = [0] * pool.n_envs  # tick of the next germination
        self.next_slot = [0] * pool.n_envs  # slot to try first for it
        self.next_blueprint = [0] * pool.n_envs  # position in the rotation of blueprints

    def state_dict(self) -> dict[str, Any]:
        """Return the tick, slot and blueprint of the next germination, for an episode that is continued later."""
        return {
            "next_germination": self.next_germination,
            "next_slot": self.next_slot,
            "next_blueprint": self.next_blueprint,
        }

    def load_state_dict(self, pool: Hosts, state: Mapping[str, Any]) -> None:
        """Continue an episode from a state of `state_dict`, in place of `reset`."""
        self.reset(pool)
        self.next_germination, self.next_slot = list(state["next_germination"]), list(state["next_slot"])
        self.next_blueprint = list(state["next_blueprint"])

    def act(self, pool: Hosts) -> Action:
        return to_action([self._choose_action(pool, host) for host in range(pool.n_envs)], pool.device)

    def _choose_action(self, pool: Hosts, host: int) -> tuple[int, ...]:
        slots = range(len(pool.space.slot))
        for k in slots:
            if is_possible(pool, host, make_action(Op.FOSSILIZE, k)):
                return make_action(Op.FOSSILIZE, k)
        if pool.envs[host].tick < self.next_germination[host]:
            return WAIT_ACTION
        for step in slots:
            k = (self.next_slot[host] + step) % len(slots)
            for offset in range(len(self.blueprints)):
                position = (self.next_blueprint[host] + offset) % len(self.blueprints)
                action = make_action(Op.GERMINATE, k, self.blueprints[position], tempo=self.tempo)
                if is_possible(pool, host, action):
                    self.next_slot[host], self.next_blueprint[host] = k + 1, position + 1
                    self.next_germination[host] = pool.envs[host].tick + self.config.every
                    return action
        return WAIT_ACTION
