"""Schedules in a pool: played, and written down from what another controller does."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from esper_lightning.envs import HEADS, Action, HostPool, Op
from esper_lightning.envs.actions import to_action
from esper_lightning.envs.transfer import download
from esper_lightning.tamiyo.controller import Controller
from esper_lightning.tamiyo.schedule import Entry, Schedule, decisions, entry_of

WAIT = (0,) * len(HEADS)


def possible(pool: HostPool, host: int, decision: Sequence[int]) -> bool:
    """Would the pool carry this out now: do the masks allow it, and has the Governor no reason against it?"""
    return pool.masks_on_cpu.allow(host, decision) and not pool.envs[host].against(decision)


class FixedSchedule:
    """Does what is written, whatever happens.

    An entry waits for its tick, and then until it is possible. One entry is carried out per tick, of those that are due
    and possible the first; those before it that concern the same slot are then given up.

    Args:
        schedules: One for all hosts, or one for each.
    """

    def __init__(self, schedules: Schedule | Sequence[Schedule]) -> None:
        self.schedules = schedules

    def reset(self, pool: HostPool) -> None:
        if isinstance(self.schedules, Schedule):
            self.left = [decisions(self.schedules, pool)] * pool.n_envs  # these lists are replaced, never changed
            return
        if len(self.schedules) != pool.n_envs:
            raise ValueError(f"there are {len(self.schedules)} schedules for {pool.n_envs} hosts; give one for each")
        self.left = [decisions(schedule, pool) for schedule in self.schedules]

    def act(self, pool: HostPool) -> Action:
        return to_action([self._decide(pool, host) for host in range(pool.n_envs)], pool.device)

    def _decide(self, pool: HostPool, host: int) -> tuple[int, ...]:
        left = self.left[host]
        for i, (tick, decision) in enumerate(left):
            if tick > pool.envs[host].tick:
                break
            if possible(pool, host, decision):
                slot = HEADS.index("slot")
                others = [due for due in left[:i] if due[1][slot] != decision[slot]]
                self.left[host] = others + left[i + 1 :]
                return decision
        return WAIT


def prices_in(pool: HostPool) -> list[float]:
    """What parameters cost in each environment's episode."""
    return [env.prices.parameters for env in pool.envs]


class FixedPerPrice(FixedSchedule):
    """Does what is written for a host's price, the nearest one that something is written for: all that can be known of
    a host before it begins.

    Args:
        schedules: By price of parameters.
    """

    def __init__(self, schedules: Mapping[float, Schedule]) -> None:
        super().__init__(())
        self.by_price = dict(schedules)

    def reset(self, pool: HostPool) -> None:
        self.schedules = [
            self.by_price[min(self.by_price, key=lambda known: abs(known - own))] for own in prices_in(pool)
        ]
        super().reset(pool)


class Recording:
    """Lets another controller decide, and keeps what it decided: `schedules`, one per host, of the last episode."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller

    def reset(self, pool: HostPool) -> None:
        self.controller.reset(pool)
        self.slots = tuple(pool.space.slot)
        self.entries: list[list[Entry]] = [[] for _ in range(pool.n_envs)]

    def act(self, pool: HostPool) -> Action:
        action = self.controller.act(pool)
        chosen = zip(*download(torch.stack(action)).tolist(), strict=True)
        for i, (env, entries, decision) in enumerate(zip(pool.envs, self.entries, chosen, strict=True)):
            # What is impossible, or what the Governor will refuse, is not done.
            if decision[0] != Op.WAIT and possible(pool, i, decision):
                entries.append(entry_of(env.tick, decision, pool.space))
        return action

    @property
    def schedules(self) -> list[Schedule]:
        return [Schedule(self.slots, tuple(entries)) for entries in self.entries]


def record(pool: HostPool, controller: Controller, seeds: Sequence[int]) -> list[Schedule]:
    """What `controller` does on hosts that depend on `seeds` alone, one schedule per host; the pool is used up."""
    recording = Recording(controller)
    pool.reset(seeds)
    recording.reset(pool)
    for _ in range(pool.config.horizon):
        pool.step(recording.act(pool))
    return recording.schedules


def most_common(schedules: Sequence[Schedule]) -> tuple[Schedule, int]:
    """The schedule that most hosts have, the first of several, and how many have it."""
    return Counter(schedules).most_common(1)[0]


def yoked(schedules: Sequence[Schedule], kinds: Sequence[str], prices: Sequence[float]) -> list[Schedule]:
    """For every host what was done to the next one of its kind, in the order of their prices (the last one's is the
    first); to itself, where it is the only one."""
    given = list(schedules)
    for kind in set(kinds):
        same = sorted((host for host, other in enumerate(kinds) if other == kind), key=lambda host: prices[host])
        for host, following in zip(same, same[1:] + same[:1], strict=True):
            given[host] = schedules[following]
    return given
