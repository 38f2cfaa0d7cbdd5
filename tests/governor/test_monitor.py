import math
from copy import deepcopy
from typing import Any

import pytest
import torch

from esper_lightning.envs.governor import (
    EpochStats,
    GovernorConfig,
    HostMonitor,
    Judgement,
    Verdict,
)
from tests.runs import differences

HEALTHY, SUSPICIOUS, ROLL_BACK, END = Verdict

CONFIG = GovernorConfig(
    window=2, max_loss=12.0, max_ratio=3.0, patience=2, cooldown=2, max_rollbacks=1,
    snapshot_every=3, learned=0.6, guessing=0.065,
)  # fmt: skip

CHANCE = math.log(10.0)


def guard() -> HostMonitor:
    return HostMonitor(CONFIG, chance_loss=CHANCE, steps_per_epoch=4)


def tick(guard: HostMonitor, loss: float = 1.0, skipped: int = 0, alphas: tuple[float, ...] = (0.0, 0.0)) -> Judgement:
    return guard.judge(EpochStats(loss, 1.0), skipped, list(alphas))


def state(number: float) -> dict[str, Any]:
    return {"weights": torch.full((3,), number), "tick": 4}


def test_a_seed_that_loses_weight_makes_the_past_say_nothing() -> None:
    for before, now, forgets in (
        ((0.0, 0.5), (0.0, 0.7), False),
        ((0.5, 0.5), (0.5, 0.4), True),  # one that fades, or is given a lower target
        ((0.5, 1.0), (0.7, 0.0), True),  # one that is culled, while another one rises
        ((1.0, 1.0), (1.0, 1.0), False),
    ):
        watched = guard()
        for _ in range(3):
            tick(watched, alphas=before)
        assert tick(watched, 5.0, alphas=now).outcome is (HEALTHY if forgets else SUSPICIOUS)
        assert watched.governor_state.losses == ((5.0,) if forgets else (1.0, 1.0))


@pytest.mark.parametrize("losses", [(), (1.0, 1.0, 1.0, 9.0), (1.0, math.nan, 1.0), (math.nan, math.nan)])
def test_a_guard_that_is_saved_at_any_time_goes_on_as_if_nothing_had_been(losses: tuple[float, ...]) -> None:
    watched, other = guard(), guard()
    watched.take_snapshot(state(0.0))
    for loss in losses:
        tick(watched, loss, alphas=(0.5, 0.0))
    saved = deepcopy(watched.state_dict())
    other.take_snapshot({"something": torch.ones(99)})
    other.load_state_dict(saved)

    assert differences(other.state_dict(), saved) == []
    for loss in (9.0, 9.0, 1.0, 1.0, math.inf):
        assert tick(watched, loss).outcome is tick(other, loss).outcome
        assert watched.snapshot_due == other.snapshot_due
