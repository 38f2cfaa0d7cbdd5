"""Open-loop controller that grows seeds at fixed intervals: a lower bound for controllers that observe the host."""

from dataclasses import dataclass

from esper_lightning.blueprints import nearest
from esper_lightning.envs import Action, HostPool, Op
from esper_lightning.envs.actions import to_action
from esper_lightning.tamiyo.climbing import complete, fastest
from esper_lightning.tamiyo.replay import WAIT, possible


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

    def reset(self, pool: HostPool) -> None:
        offered = pool.space.blueprint
        for name in self.config.blueprints or ():
            if name not in offered:
                raise ValueError(f"periodic.blueprints: {name!r} is not on offer; {nearest(name, offered)}")
        self.blueprints = [offered.index(name) for name in self.config.blueprints or offered]
        self.tempo, _ = fastest(pool)
        self.due = [0] * pool.n_envs  # tick of the next germination
        self.slot = [0] * pool.n_envs  # slot to try first for it
        self.turn = [0] * pool.n_envs  # position in the rotation of blueprints

    def act(self, pool: HostPool) -> Action:
        return to_action([self._decide(pool, host) for host in range(pool.n_envs)], pool.device)

    def _decide(self, pool: HostPool, host: int) -> tuple[int, ...]:
        slots = range(len(pool.space.slot))
        for op in (Op.FOSSILIZE, Op.ADVANCE):
            for k in slots if op < len(pool.space.op) else ():
                if possible(pool, host, complete(op, k)):
                    return complete(op, k)
        if pool.envs[host].tick < self.due[host]:
            return WAIT
        for step in slots:
            k = (self.slot[host] + step) % len(slots)
            for turn in range(len(self.blueprints)):
                place = (self.turn[host] + turn) % len(self.blueprints)
                decision = complete(Op.GERMINATE, k, self.blueprints[place], tempo=self.tempo)
                if possible(pool, host, decision):
                    self.slot[host], self.turn[host] = k + 1, place + 1
                    self.due[host] = pool.envs[host].tick + self.config.every
                    return decision
        return WAIT
