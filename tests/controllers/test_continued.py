"""Controllers whose state is saved in the middle of an episode, and that continue it as if nothing had happened."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from esper_lightning.controllers.fixed_schedule import FixedSchedule
from esper_lightning.controllers.heuristic import Heuristic, HeuristicConfig
from esper_lightning.controllers.hill_climbing import ClimbingConfig, HillClimbing
from esper_lightning.controllers.learned import LearnedController
from esper_lightning.controllers.periodic import Periodic, PeriodicConfig
from esper_lightning.controllers.schedule import Schedule, ScheduledAction
from esper_lightning.envs import Action, HostPool
from esper_lightning.tamiyo.policy import Policy

MakePool = Callable[..., HostPool]

HORIZON = 10

EAGER = HeuristicConfig(stable_loss=10.0, stable_ticks=1, min_age=0, plateau_points=100.0, plateau_ticks=1)


def schedule(pool: HostPool) -> FixedSchedule:
    first, second, _ = pool.space.slot
    grow, keep = (tick_op for tick_op in ((0, "GERMINATE"), (7, "CULL")))
    entries = (
        ScheduledAction(*grow, first, blueprint=pool.space.blueprint[0]),
        ScheduledAction(5, "GERMINATE", second, blueprint=pool.space.blueprint[0]),
        ScheduledAction(*keep, first),
    )
    return FixedSchedule(Schedule(tuple(pool.space.slot), entries))


MADE: dict[str, Callable[[HostPool], Any]] = {
    "periodic": lambda pool: Periodic(PeriodicConfig(every=3)),
    "climbing": lambda pool: HillClimbing(ClimbingConfig(at_once=2)),
    "heuristic": lambda pool: Heuristic(EAGER),
    "schedule": schedule,
}


def play(pool: HostPool, controller: Any, ticks: int) -> list[list[int]]:
    """Return the actions of a controller in the next ticks, one row of indices per tick."""
    rows = []
    for _ in range(ticks):
        action: Action = controller.act(pool)
        rows.append(torch.stack(action).flatten().tolist())
        pool.step(action)
    return rows


def continued(pool: HostPool, make: Callable[[HostPool], Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the actions of an episode, and those with a second controller that takes over in the middle."""
    episodes = []
    for takes_over in (False, True):
        pool.reset([3])
        controller = make(pool)
        controller.reset(pool)
        rows = play(pool, controller, HORIZON // 2)
        if takes_over:
            file = io.BytesIO()
            torch.save(controller.state_dict(), file)
            file.seek(0)
            controller = make(pool)
            controller.load_state_dict(pool, torch.load(file, weights_only=True))
        episodes.append(rows + play(pool, controller, HORIZON - HORIZON // 2))
    return episodes[0], episodes[1]


@pytest.mark.parametrize("name", MADE)
def test_a_rule_continues_an_episode_from_its_saved_state(make_pool: MakePool, name: str) -> None:
    whole, taken_over = continued(make_pool(1, horizon=HORIZON), MADE[name])

    assert taken_over == whole
    assert any(row[0] != 0 for row in whole[HORIZON // 2 :]), "the second half has something to continue"


def test_a_policy_continues_with_its_memory(make_pool: MakePool, make_policy: Callable[..., Policy]) -> None:
    pool = make_pool(1, horizon=HORIZON)
    policy = make_policy(pool, 1)

    whole, taken_over = continued(pool, lambda pool: LearnedController(policy, torch.nn.Identity()))

    assert taken_over == whole
