import math
from typing import Any

import pytest

from esper_lightning.ppo.losses import Anneal, PPOConfig


def test_an_anneal_is_linear_and_stops_at_its_end() -> None:
    anneal = Anneal(start=1.0, end=0.2)

    assert [anneal.at(progress) for progress in (0.0, 0.25, 0.5, 1.0, 3.0)] == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])


def test_a_geometric_anneal_changes_by_equal_ratios() -> None:
    anneal = Anneal(start=0.08, end=0.005, shape="geometric")

    values = [anneal.at(progress) for progress in (0.0, 0.25, 0.5, 0.75, 1.0, 3.0)]
    assert values == pytest.approx([0.08, 0.04, 0.02, 0.01, 0.005, 0.005])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "ppo.epochs must be at least 1, got 0"),
        ({"minibatches": 0}, "ppo.minibatches must be at least 1"),
        ({"gamma": 0.0}, r"gamma must lie in \(0, 1\]"),
        ({"gamma": 1.01}, r"gamma must lie in \(0, 1\]"),
        ({"gae_lambda": -0.1}, r"gae_lambda in \[0, 1\]"),
        ({"gae_lambda": 1.1}, r"gae_lambda in \[0, 1\]"),
        ({"clip": 0.0}, "ppo.clip must be positive"),
        ({"max_grad_norm": -1.0}, "ppo.max_grad_norm must be positive"),
        ({"target_kl": 0.0}, "ppo.target_kl must be positive"),
        ({"value_clip": -0.2}, "ppo.value_clip must be positive"),
        ({"advantage_floor": 0.0}, "advantage_floor"),  # equal advantages would become 0/0
        ({"lr": Anneal(start=-1e-3, end=1e-4)}, "lr"),
        ({"lr": Anneal(start=1e-3, end=-1e-4)}, "lr"),
        ({"entropy": Anneal(start=0.08, end=0.0, shape="geometric")}, "ppo.entropy.shape geometric never comes to 0"),
        ({"value_coefficient": -0.5}, "value_coefficient"),
        ({"value_coefficient": math.inf}, r"value_coefficient must be at most 1e\+30, got inf"),
        ({"lr": Anneal(start=1e-3, end=1e38)}, r"ppo.lr.end must be at most 1e\+30, got 1e\+38"),
        ({"clip": 1e300}, r"ppo.clip must be at most 1e\+30"),
        ({"adam_eps": math.nan}, "ppo.adam_eps must be positive, got nan"),
        ({"value_warmup": -1}, "ppo.value_warmup must not be negative, got -1"),
        ({"log_ratio_clamp": -1.0}, "ppo.log_ratio_clamp must be positive"),
        ({"clip": 0.2, "log_ratio_clamp": 0.2231}, r"must exceed 0.223, where the clip range 0.2 ends, got 0.2231"),
        ({"clip": 2.0, "log_ratio_clamp": 1.0986}, r"must exceed 1.1, where the clip range 2.0 ends"),
        ({"entropy_floors": {"op": 0.3, "slot": 1.1}}, r"ppo.entropy_floors must lie in \(0, 1\], got 1.1 for slot"),
        ({"entropy_floors": {"op": 0.0}}, r"ppo.entropy_floors must lie in \(0, 1\]"),
        ({"entropy_floor_weight": 0.0}, "ppo.entropy_floor_weight must be positive"),
    ],
)
def test_an_impossible_ppo_config_is_refused_with_its_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


@pytest.mark.parametrize("setting", ["entropy_weights", "entropy_floors"])
def test_a_number_for_a_head_that_there_is_not_is_refused_by_name(setting: str) -> None:
    config = PPOConfig(**{setting: {"op": 1.0, "slots": 1.0}})

    with pytest.raises(ValueError, match=rf"{setting} names unknown heads \['slots'\]; there are op, slot"):
        config.check_heads(["op", "slot"])
    config.check_heads(["op", "slots", "tempo"])


def test_the_weight_of_the_value_loss_rises_by_equal_steps_and_stays() -> None:
    rising, constant = PPOConfig(value_coefficient=0.8, value_warmup=3), PPOConfig(value_coefficient=0.8)

    assert [rising.value_coefficient_at(rollout) for rollout in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert [constant.value_coefficient_at(rollout) for rollout in range(2)] == [0.8, 0.8]
