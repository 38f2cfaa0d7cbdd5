"""Blending of a seed's output into the host's feature."""

from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from esper_lightning.growth.blend import Curve, Ramp, blend
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import LAYOUTS, SIMPLE, bits, generator_of, grow

SHAPES: dict[Layout, tuple[int, ...]] = {"image": (3, 8, 4, 5), "sequence": (3, 7, 8), "vector": (3, 8)}

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def feature(layout: Layout, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPES[layout], generator=generator_of(3), dtype=torch.float64).to(dtype)


def grown_slot(layout: Layout, stage: Stage = Stage.PROBATIONARY) -> SeedSlot:
    slot = SeedSlot("place", layout, 8)
    grow(slot, stage, SIMPLE[layout], Ramp())
    return slot


@pytest.mark.parametrize("alpha", [0.0, 0.125, 0.5, 0.7, 1.0])
@every_layout
def test_blending_is_its_formula_in_double_precision(layout: Layout, alpha: float) -> None:
    slot, x = grown_slot(layout).double(), feature(layout, torch.float64)
    slot.alpha.fill_(alpha)
    h, s = x.numpy(), slot.seed(x).detach().numpy()
    np.testing.assert_allclose(slot(x).detach().numpy(), (1.0 - alpha) * h + alpha * s, rtol=1e-12, atol=1e-12)
    assert alpha or torch.equal(slot(x), x), "exactly the host at alpha 0"
    slot.move_to(Stage.FOSSILIZED)
    np.testing.assert_allclose(slot(x).detach().numpy(), s, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("host", "seed"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")])
def test_the_host_keeps_its_precision_and_its_numbers_whatever_the_seeds(host: str, seed: str) -> None:
    h, s = feature("vector", getattr(torch, host)), 3.0 * feature("vector", getattr(torch, seed))
    blended = blend(h, s, torch.zeros(()))
    assert blended.dtype == h.dtype
    assert torch.equal(blended, h)
    assert torch.equal(blend(h, s, torch.ones(())), s.to(h.dtype))


@every_layout
def test_under_autocast_a_training_seed_learns_and_leaves_the_host_alone(layout: Layout) -> None:
    slot, x = grown_slot(layout, Stage.TRAINING), feature(layout).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = slot(x)
    y.square().sum().backward()
    assert torch.equal(bits(y), bits(x))
    assert torch.equal(x.grad, 2 * x)
    assert all(p.grad.any() for p in slot.seed.parameters())


# Ramps of alpha.


@pytest.mark.parametrize("curve", get_args(Curve))
@pytest.mark.parametrize("ticks", [0, 1, 2, 7, 300])
def test_a_ramp_rises_at_every_tick_from_exactly_0_to_exactly_1(curve: Curve, ticks: int) -> None:
    values = [Ramp(ticks, curve).value(tick) for tick in range(max(1, ticks) + 1)]
    assert (values[0], values[-1], Ramp(ticks, curve).value(ticks + 5)) == (0.0, 1.0, 1.0)
    assert all(earlier < later for earlier, later in pairwise(values))
    assert [1.0 - value for value in reversed(values)] == pytest.approx(values, abs=1e-12), "symmetric"
