"""Gradient statistics compared with double precision and hand-computed counts."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from esper_lightning.growth.gates import (
    EXPLODED_HEALTH_COST,
    NO_GRADIENT,
    VANISHED_HEALTH_COST,
    GradientStats,
    gradient_stats,
)
from tests.growth.by_hand import growing
from tests.growth.grown import loss_of

SHARES = [i / 200 for i in range(201)]


def parameter(gradient: list[float] | None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.ones(2 if gradient is None else len(gradient), dtype=dtype))
    made.grad = None if gradient is None else torch.tensor(gradient, dtype=dtype)
    return made


def stats(*gradients: list[float] | None) -> GradientStats:
    return GradientStats(*gradient_stats([parameter(gradient) for gradient in gradients]).tolist())


def health(vanished: float, exploded: float) -> float:
    return GradientStats(norm=1.0, rms=1.0, vanished=vanished, exploded=exploded).health


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([], (0.0, 0.0, 0.0, 0.0)),
        ([None], (0.0, 0.0, 1.0, 0.0)),
        ([[3.0, 0.0], [0.0, 4.0]], (5.0, 2.5, 0.0, 0.0)),
        ([None, [3.0], [4.0]], (5.0, 2.5, 1 / 3, 0.0)),  # two elements without and one each with a gradient
    ],
)
def test_norm_and_rms_are_global_each_named_and_defined_for_nothing(
    gradients: list[list[float] | None], expected: tuple[float, ...]
) -> None:
    """F13: norm and RMS are taken over all elements, under separate names; they are defined without gradients."""
    assert stats(*gradients) == pytest.approx(expected)
    assert gradient_stats([], torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([[3.0, 0.0], [0.0, 4.0]], 1.0),
        ([[1e-8], [1.0], [1.0], [1.0]], 0.875),  # 1 - 0.5/4
        ([[0.0, 0.0], [0.0]], 0.5),
        ([[5.1], [1.0]], 0.6),  # 1 - 0.8/2
        ([[6.0], [60.0], [-600.0]], 0.2),
        ([[4.0, 4.0], [1.0]], 0.6),  # each element is below 5, but the tensor's norm is not
        ([[4.9], [2e-7]], 1.0),
        ([[1e-9], None, [7.0], [1.0]], 0.55),  # 1 - 0.5·2/4 - 0.8/4
        ([None, None, None], 0.5),
        ([[1.0], [math.nan]], 0.6),
        ([[1.0], [math.inf]], 0.6),
    ],
)
def test_health_counts_tensors_that_vanished_or_exploded(gradients: list[list[float] | None], expected: float) -> None:
    assert stats(*gradients).health == pytest.approx(expected)
    assert health(1.0, 1.0) == 0.0


def test_frozen_parameters_count_nowhere() -> None:
    frozen, old = parameter([30.0, 40.0]), parameter(None)
    for each in (frozen, old):
        each.requires_grad = False
    learning = [parameter([3.0]), parameter([4.0])]
    assert GradientStats(*gradient_stats([frozen, *learning, old]).tolist()) == stats([3.0], [4.0])
    assert GradientStats(*gradient_stats([frozen, old]).tolist()) == NO_GRADIENT


@pytest.mark.parametrize(
    ("seed", "host", "ratio"),
    [(3.0, 4.0, 0.75), (0.0, 4.0, None), (3.0, 0.0, None), (math.inf, 4.0, None), (3.0, math.nan, None)],
)
def test_a_ratio_needs_two_gradients_that_say_something(seed: float, host: float, ratio: float | None) -> None:
    assert NO_GRADIENT._replace(norm=seed).ratio(NO_GRADIENT._replace(norm=host)) == ratio


@pytest.mark.parametrize("others", [0.0, 0.25, 0.9])
def test_health_is_a_continuous_function_of_the_tensors_that_learn(others: float) -> None:
    """F14: health falls by the named costs per share of tensors that vanished or exploded, and never jumps."""
    for along in (lambda share: health(share, others), lambda share: health(others, share)):
        path = [along(share) for share in SHARES]
        largest = max(VANISHED_HEALTH_COST, EXPLODED_HEALTH_COST) / (len(SHARES) - 1)
        assert all(0.0 <= before - after <= largest + 1e-9 for before, after in pairwise(path))
        assert path[0] > path[-1]


def test_gradients_can_be_collected_twice() -> None:
    """F20: collecting gradient statistics changes nothing; a second collection returns the same values."""
    network = growing()
    network.germinate("block1", "conv_light")
    loss_of(network.module).backward()
    first, second = network.gradient_stats_tensor(), network.gradient_stats_tensor()
    assert (first[:2, 0] > 0).all(), "host and seed have gradients"
    assert torch.equal(first, second)
    assert network.measure_gradients() == network.measure_gradients() != {}
