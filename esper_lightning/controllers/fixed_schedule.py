"""Controllers that play schedules, and recording of schedules from other controllers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from esper_lightning.controllers.learned import Controller, Hosts
from esper_lightning.controllers.schedule import Schedule, ScheduledAction, actions_by_tick, make_scheduled_action
from esper_lightning.envs import HEADS, Action, HostPool, Op
from esper_lightning.envs.device_transfer import download
from esper_lightning.envs.spaces.actions import to_action

WAIT_ACTION = (0,) * len(HEADS)


def is_possible(pool: Hosts, host: int, action: Sequence[int]) -> bool:
    """Return True if the pool would carry out the action now: the masks and the Governor both allow it."""
    return pool.masks_on_cpu.allows(host, action) and not pool.envs[host].refusal_reasons(action)


class FixedSchedule:
    """Plays a schedule, whatever the state of the host.

    A scheduled action waits for its tick, and then until it is possible. Each tick carries out the first action that is
    due and possible; earlier ones for the same slot are then dropped.

    Args:
        schedules: One for all hosts, or one per host.
    """

    def __init__(self, schedules: Schedule | Sequence[Schedule]) -> None:
        self.schedules = schedules

    def reset(self, pool: Hosts) -> None:
        if isinstance(self.schedules, Schedule):
            self.remaining = [
                actions_by_tick(self.schedules, pool)
            ] * pool.n_envs  # these lists are replaced, never changed
            return
        if len(self.schedules) != pool.n_envs:
            raise ValueError(f"there are {len(self.schedules)} schedules for {pool.n_envs} hosts; give one for each")
        self.remaining = [actions_by_tick(schedule, pool) for schedule in self.schedules]

    def state_dict(self) -> dict[str, Any]:
        """Return the remaining actions of each host, for an episode that is continued later."""
        return {"remaining": [[[tick, list(action)] for tick, action in remaining] for remaining in self.remaining]}

    def load_state_dict(self, pool: Hosts, state: Mapping[str, Any]) -> None:
        """Continue an episode from a state of `state_dict`, in place of `reset`."""
        self.remaining = [[(tick, tuple(action)) for tick, action in remaining] for remaining in state["remaining"]]

    def act(self, pool: Hosts) -> Action:
        return to_action([self._choose_action(pool, host) for host in range(pool.n_envs)], pool.device)

    def _choose_action(self, pool: Hosts, host: int) -> tuple[int, ...]:
        remaining = self.remaining[host]
        for i, (tick, action) in enumerate(remaining):
            if tick > pool.envs[host].tick:
                break
            if is_possible(pool, host, action):
                slot = HEADS.index("slot")
                others = [due for due in remaining[:i] if due[1][slot] != action[slot]]
                self.remaining[host] = others + remaining[i + 1 :]
                return action
        return WAIT_ACTION


def parameter_prices(pool: Hosts) -> list[float]:
    """Return the price of parameters in the current episode of each environment."""
    return [env.prices.parameters for env in pool.envs]


class SchedulePerPrice(FixedSchedule):
    """Plays the schedule for the host's price, or for the nearest price with a schedule.

    The price is the only variable that is known before an episode begins.

    Args:
        schedules: Schedules by price of parameters.
    """

    def __init__(self, schedules: Mapping[float, Schedule]) -> None:
        super().__init__(())
        self.schedule_by_price = dict(schedules)

    def reset(self, pool: Hosts) -> None:
        self.schedules = [
            self.schedule_by_price[min(self.schedule_by_price, key=lambda known: abs(known - price))]
            for price in parameter_prices(pool)
        ]
        super().reset(pool)


class RecordingController:
    """Records the actions of another controller: `schedules` holds one schedule per host of the last episode."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller

    def reset(self, pool: HostPool) -> None:
        self.controller.reset(pool)
        self.slots = tuple(pool.space.slot)
        self.entries: list[list[ScheduledAction]] = [[] for _ in range(pool.n_envs)]

    def act(self, pool: HostPool) -> Action:
        action = self.controller.act(pool)
        rows = zip(*download(torch.stack(action)).tolist(), strict=True)
        for i, (env, entries, row) in enumerate(zip(pool.envs, self.entries, rows, strict=True)):
            # Actions that are impossible or vetoed by the Governor are not carried out.
            if row[0] != Op.WAIT and is_possible(pool, i, row):
                entries.append(make_scheduled_action(env.tick, row, pool.space))
        return action

    @property
    def schedules(self) -> list[Schedule]:
        return [Schedule(self.slots, tuple(entries)) for entries in self.entries]


def most_common_schedule(schedules: Sequence[Schedule]) -> tuple[Schedule, int]:
    """Return the most frequent schedule, the first of several, and its number of hosts."""
    return Counter(schedules).most_common(1)[0]


def yoke_schedules(schedules: Sequence[Schedule], kinds: Sequence[str], prices: Sequence[float]) -> list[Schedule]:
    """Return for every host the schedule of another host of the same kind: the next one in the order of prices.

    The host with the highest price gets the schedule of the one with the lowest; a host without others of its kind
    keeps its own.
    """
    assigned = list(schedules)
    for kind in set(kinds):
        same = sorted((host for host, other in enumerate(kinds) if other == kind), key=lambda host: prices[host])
        for host, following in zip(same, same[1:] + same[:1], strict=True):
            assigned[host] = schedules[following]
    return assigned
