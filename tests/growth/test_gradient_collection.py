"""Gradient statistics of a group: defined without tensors, continuous health, repeatable collection."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.envs import HostPool
from esper_lightning.growth.gradient_stats import (
    EXPLODED_HEALTH_COST,
    EXPLODED_NORM,
    NO_GRADIENT,
    VANISHED_HEALTH_COST,
    VANISHED_NORM,
    GradientStats,
    gradient_stats,
)
from tests.decisions import act, germinate

MakePool = Callable[..., HostPool]

SHARES = [i / 200 for i in range(201)]


def total_norm(gradients: list[Tensor]) -> float:
    return nn.utils.get_total_norm(gradients).item()


def health(vanished: float, exploded: float) -> float:
    return GradientStats(norm=1.0, rms=1.0, vanished=vanished, exploded=exploded).health


def test_norm_and_rms_are_global_each_named_and_defined_for_nothing() -> None:
    """F13: norm and RMS are taken over all elements, under separate names; they are defined without gradients."""
    three, four = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 7))

    def stats(parameters: list[nn.Parameter]) -> GradientStats:
        return GradientStats(*gradient_stats(parameters).tolist())

    assert stats([]) == NO_GRADIENT == GradientStats(norm=0.0, rms=0.0, vanished=0.0, exploded=0.0)
    assert stats([three, four]) == NO_GRADIENT._replace(vanished=1.0)
    three.grad, four.grad = torch.tensor([3.0, 0.0]), torch.zeros(2, 7)
    four.grad[1, 3] = 4.0

    both = stats([three, four])
    assert both == GradientStats(norm=5.0, rms=5.0 / math.sqrt(2 + 14), vanished=0.0, exploded=0.0)
    assert stats([four]).rms == pytest.approx(math.sqrt(four.grad.square().mean().item()))
    assert both.norm == total_norm([three.grad, four.grad])


@pytest.mark.parametrize("others", [0.0, 0.25, 0.9])
def test_health_is_a_continuous_function_of_the_tensors_that_learn(others: float) -> None:
    """F14: health falls by the named costs per share of tensors that vanished or exploded, and never jumps."""
    for along in (lambda share: health(share, others), lambda share: health(others, share)):
        path = [along(share) for share in SHARES]
        largest = max(VANISHED_HEALTH_COST, EXPLODED_HEALTH_COST) / (len(SHARES) - 1)
        assert all(0.0 <= before - after <= largest + 1e-9 for before, after in pairwise(path))
        assert path[0] > path[-1]
    slopes = [(health(0.0, 0.0) - health(*bad)) / 0.1 for bad in ((0.1, 0.0), (0.0, 0.1))]
    assert slopes == pytest.approx([VANISHED_HEALTH_COST, EXPLODED_HEALTH_COST])


def test_one_tensor_among_many_moves_health_by_no_more_than_its_share() -> None:
    """F14: a tensor whose gradient crosses a named threshold changes health by its share of the cost, and nothing else
    that happens to it changes health at all."""
    tensors = [nn.Parameter(torch.ones(3)) for _ in range(20)]
    for tensor in tensors:
        tensor.grad = torch.full((3,), 0.5)

    def with_norm(norm: float) -> float:
        tensors[0].grad = torch.tensor([0.0, norm, 0.0])
        return GradientStats(*gradient_stats(tensors).tolist()).health

    for threshold, cost in ((VANISHED_NORM, VANISHED_HEALTH_COST), (EXPLODED_NORM, EXPLODED_HEALTH_COST)):
        below, above = with_norm(threshold * (1 - 1e-3)), with_norm(threshold * (1 + 1e-3))
        assert abs(above - below) == pytest.approx(cost / 20)
    assert with_norm(2 * VANISHED_NORM) == with_norm(1.0) == with_norm(EXPLODED_NORM / 2) == 1.0


def test_gradients_can_be_collected_twice(make_pool: MakePool) -> None:
    """F20: collecting gradient statistics changes nothing; a second collection returns the same values."""
    pool = make_pool(1)
    pool.step(act(germinate(0, 1)))
    growing = pool.envs[0].growing
    first, second = growing.gradient_stats_tensor(), growing.gradient_stats_tensor()

    assert (first[:2, 0] > 0).all(), "host and seed have gradients"
    assert torch.equal(first, second)
    assert growing.measure_gradients() == growing.measure_gradients() != {}
