import math
from typing import Any

import pytest

from esper_lightning.ppo.losses import Anneal, PPOConfig


@pytest.mark.parametrize(
    ("shape", "expected"), [("linear", [1.0, 0.8125, 0.625, 0.25, 0.25]), ("geometric", [1.0, 0.7071, 0.5, 0.25, 0.25])]
)
def test_a_schedule_moves_by_equal_differences_or_ratios_and_stops(shape: Any, expected: list[float]) -> None:
    anneal = Anneal(start=1.0, end=0.25, shape=shape)

    assert [anneal.at(progress) for progress in (0.0, 0.25, 0.5, 1.0, 3.0)] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "ppo.epochs must be at least 1, got 0"),
        ({"sequence": 0}, "ppo.sequence must be at least 1"),
        ({"gamma": 0.0}, "ppo.gamma must lie between 0 and 1"),
        ({"gae_lambda": 1.1}, "ppo.gae_lambda must lie between 0 and 1"),
        ({"max_grad_norm": math.nan}, "ppo.max_grad_norm must be positive, got nan"),
        ({"value_coefficient": -0.5}, "value_coefficient must not be negative"),
    ],
)
def test_an_impossible_ppo_config_is_refused_with_its_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def test_an_impossible_schedule_is_refused_with_its_reason() -> None:
    with pytest.raises(ValueError, match=r"must not be negative, got 0\.001, -0\.1"):
        Anneal(start=1e-3, end=-0.1)
    with pytest.raises(ValueError, match="a geometric schedule never comes to 0"):
        Anneal(start=1e-3, end=0.0, shape="geometric")
