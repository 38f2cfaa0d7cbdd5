"""Growing by the clock, without looking: what any rule that looks should beat."""

from dataclasses import dataclass

from esper_lightning.blueprints import nearest
from esper_lightning.envs import Action, HostPool, Op
from esper_lightning.envs.actions import to_action
from esper_lightning.tamiyo.climbing import complete, fastest
from esper_lightning.tamiyo.replay import WAIT, possible


@dataclass(frozen=True, kw_only=True)
class PeriodicConfig:
    """How often something is germinated, and what."""

    every: int = 4
    """Ticks from one germination to the next."""

    blueprints: list[str] | None = None
    """Blueprints in turn. None: all that are on offer."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"periodic.every must be at least 1, got {self.every}")
        if self.blueprints is not None and not self.blueprints:
            raise ValueError("periodic.blueprints is empty; name at least one, or leave it out for all")


class Periodic:
    """Every so many ticks germinates the next blueprint in the next slot that is free, and keeps whatever it may."""

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
        self.slot = [0] * pool.n_envs  # where the search for it begins
        self.turn = [0] * pool.n_envs  # and what is next

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
