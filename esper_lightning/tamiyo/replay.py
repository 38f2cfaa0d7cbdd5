"""Controllers that play schedules, and recording of schedules from other controllers."""

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
    """Return True if the pool would carry out the action now: the masks and the Governor both allow it."""
    return pool.masks_on_cpu.allow(host, decision) and not pool.envs[host].against(decision)


class FixedSchedule:
    """Plays a schedule, whatever the state of the host.

    A scheduled action waits for its tick, and then until it is possible. Each tick carries out the first action that is
    due and possible; earlier ones for the same slot are then dropped.

    Args:
        schedules: One for all hosts, or one per host.
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
    """Return the price of parameters in the current episode of each environment."""
    return [env.prices.parameters for env in pool.envs]


class FixedPerPrice(FixedSchedule):
    """Plays the schedule for the host's price, or for the nearest price with a schedule.

    The price is the only variable that is known before an episode begins.

    Args:
        schedules: Schedules by price of parameters.
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
    """Records the actions of another controller: `schedules` holds one schedule per host of the last episode."""

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
            # Actions that are impossible or vetoed by the Governor are not carried out.
            if decision[0] != Op.WAIT and possible(pool, i, decision):
                entries.append(entry_of(env.tick, decision, pool.space))
        return action

    @property
    def schedules(self) -> list[Schedule]:
        return [Schedule(self.slots, tuple(entries)) for entries in self.entries]


def record(pool: HostPool, controller: Controller, seeds: Sequence[int]) -> list[Schedule]:
    """Return the actions of `controller` on hosts that depend on `rng_seeds` alone, as one schedule per host.

    The state of the pool is overwritten.
    """
    recording = Recording(controller)
    pool.reset(seeds)
    recording.reset(pool)
    for _ in range(pool.config.horizon):
        pool.step(recording.act(pool))
    return recording.schedules


def most_common(schedules: Sequence[Schedule]) -> tuple[Schedule, int]:
    """Return the most frequent schedule, the first of several, and its number of hosts."""
    return Counter(schedules).most_common(1)[0]


def yoked(schedules: Sequence[Schedule], kinds: Sequence[str], prices: Sequence[float]) -> list[Schedule]:
    """Return for every host the schedule of another host of the same kind: the next one in the order of prices.

    The host with the highest price gets the schedule of the one with the lowest; a host without others of its kind
    keeps its own.
    """
    given = list(schedules)
    for kind in set(kinds):
        same = sorted((host for host, other in enumerate(kinds) if other == kind), key=lambda host: prices[host])
        for host, following in zip(same, same[1:] + same[:1], strict=True):
            given[host] = schedules[following]
    return given
