"""Gradient statistics compared with double precision and hand-computed counts."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from esper_lightning.growth.gradient_stats import NO_GRADIENT, GradientStats, gradient_stats
from tests.growth.grown import generator_of, loss_of, small_cnn


def parameter(gradient: list[float] | None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.ones(2 if gradient is None else len(gradient), dtype=dtype))
    made.grad = None if gradient is None else torch.tensor(gradient, dtype=dtype)
    return made


def stats(*gradients: list[float] | None) -> GradientStats:
    return GradientStats(*gradient_stats([parameter(gradient) for gradient in gradients]).tolist())


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e4])
def test_the_norm_agrees_with_double_precision(scale: float) -> None:
    generator = generator_of(4)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3,), (64, 9), (1,), (200, 50), ())]
    for each in parameters:
        each.grad = scale * torch.randn(each.shape, generator=generator)
    flat = np.concatenate([each.grad.numpy().astype(np.float64).ravel() for each in parameters])
    norm, rms, _, _ = gradient_stats(parameters).tolist()
    assert norm == pytest.approx(math.sqrt((flat**2).sum()), rel=1e-5)
    assert rms == pytest.approx(math.sqrt((flat**2).mean()), rel=1e-5)


def test_the_norm_is_the_one_that_clipping_sees() -> None:
    network = small_cnn()
    loss_of(network).backward()
    seen = nn.utils.clip_grad_norm_(network.parameters(), 1e9).item()
    assert GradientStats(*gradient_stats(network.parameters()).tolist()).norm == pytest.approx(seen, rel=1e-5)


def test_healthy_gradients_have_health_1() -> None:
    calm = stats([3.0, 0.0], [0.0, 4.0])
    assert calm == GradientStats(norm=5.0, rms=2.5, vanished=0.0, exploded=0.0)  # rms² = 25/4
    assert calm.health == 1.0


@pytest.mark.parametrize(
    ("gradients", "health"),
    [
        ([[1e-8], [1.0], [1.0], [1.0]], 0.875),  # 1 - 0.5/4
        ([[0.0, 0.0], [0.0]], 0.5),
        ([[5.1], [1.0]], 0.6),  # 1 - 0.8/2
        ([[6.0], [60.0], [-600.0]], 0.2),
        ([[4.0, 4.0], [1.0]], 0.6),  # each element is below 5, but the tensor's norm is not
        ([[4.9], [2e-7]], 1.0),
        ([[1e-9], None, [7.0], [1.0]], 0.55),  # 1 - 0.5·2/4 - 0.8/4
        ([None, [1.0]], 0.75),
        ([None, None, None], 0.5),
    ],
)
def test_health_counts_tensors_that_vanished_or_exploded(gradients: list[list[float] | None], health: float) -> None:
    assert stats(*gradients).health == pytest.approx(health)


def test_tensors_without_a_gradient_add_nothing_to_the_norm() -> None:
    assert stats(None, [3.0], None, [4.0]).norm == 5.0
    assert stats(None) == GradientStats(norm=0.0, rms=0.0, vanished=1.0, exploded=0.0)


def test_numbers_without_a_gradient_count_in_the_mean() -> None:
    assert stats(None, [3.0], [4.0]).rms == 2.5  # two elements without and one each with a gradient: rms² = 25/4


def test_frozen_parameters_count_nowhere() -> None:
    frozen, old = parameter([30.0, 40.0]), parameter(None)
    for each in (frozen, old):
        each.requires_grad = False
    learning = [parameter([3.0]), parameter([4.0])]
    assert GradientStats(*gradient_stats([frozen, *learning, old]).tolist()) == stats([3.0], [4.0])
    assert GradientStats(*gradient_stats([frozen, old]).tolist()) == NO_GRADIENT


def test_a_group_without_parameters_answers_where_it_is_asked_to() -> None:
    assert gradient_stats([], torch.device("meta")).device.type == "meta"


def test_a_group_without_parameters_is_quiet_and_healthy() -> None:
    assert stats() == NO_GRADIENT == GradientStats(norm=0.0, rms=0.0, vanished=0.0, exploded=0.0)
    assert stats().health == 1.0
    assert gradient_stats(iter(())).shape == (4,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad: float) -> None:
    assert not math.isfinite(stats([1.0], [bad, 1.0]).norm)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_counts_as_exploded(bad: float) -> None:
    assert stats([1.0], [bad]).exploded == 0.5
    assert stats([1.0], [bad]).health == pytest.approx(0.6)


def test_health_is_never_below_zero() -> None:
    assert GradientStats(norm=1.0, rms=1.0, vanished=1.0, exploded=1.0).health == 0.0


@pytest.mark.parametrize(
    ("seed", "host", "ratio"),
    [
        (3.0, 4.0, 0.75),
        (0.0, 4.0, None),
        (3.0, 0.0, None),
        (math.inf, 4.0, None),
        (3.0, math.inf, None),
        (math.nan, 4.0, None),
        (3.0, math.nan, None),
    ],
)
def test_a_ratio_needs_two_gradients_that_say_something(seed: float, host: float, ratio: float | None) -> None:
    assert NO_GRADIENT._replace(norm=seed).ratio(NO_GRADIENT._replace(norm=host)) == ratio


def test_double_precision_stays_double() -> None:
    tiny = gradient_stats([parameter([3e-200], torch.float64), parameter([4e-200], torch.float64)])
    assert tiny.dtype == torch.float64
    assert tiny[0].item() == pytest.approx(5e-200)
    assert tiny[2].item() == 1.0


def test_statistics_carry_no_graph() -> None:
    network = small_cnn()
    loss_of(network).backward(create_graph=False)
    assert not gradient_stats(network.parameters()).requires_grad
