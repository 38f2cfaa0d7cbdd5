"""Blending of a seed's output into the host's feature."""

from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper_lightning.growth.blend import (
    BlendStyle,
    Curve,
    Ramp,
    SampleGate,
    add,
    multiply,
    straight_through,
)
from esper_lightning.growth.slot import Layout, SeedSlot, new_seed
from esper_lightning.growth.stages import Stage
from tests.growth.grown import LAYOUTS, STYLES, add_noise, generator_of, grow

AWKWARD = [0.0, -0.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"), 1.0]

SHAPES: dict[Layout, tuple[int, ...]] = {"image": (3, 8, 4, 5), "sequence": (3, 7, 8), "vector": (3, 8)}

BLUEPRINT: dict[Layout, str] = {"image": "conv_light", "sequence": "attention", "vector": "mlp_small"}

every_style = pytest.mark.parametrize("style", STYLES)

every_layout = pytest.mark.parametrize("layout", LAYOUTS)

finite = st.floats(-(2.0**60), 2.0**60, width=32)


def bits(x: Tensor) -> Tensor:
    """Return the bit patterns as integers, which distinguish 0 from -0 and make NaN equal to itself."""
    return x.detach().view(torch.int32)


def row(value: float) -> Tensor:
    return torch.full((17,), value)  # 16 elements for vector instructions, and one more


def scalar(value: float) -> Tensor:
    return torch.tensor([value], requires_grad=True)


def feature(layout: Layout, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPES[layout], generator=generator_of(3), dtype=torch.float64).to(dtype)


def grown_slot(layout: Layout, style: BlendStyle, stage: Stage = Stage.PROBATIONARY, ramp: Ramp = Ramp()) -> SeedSlot:
    slot = SeedSlot("place", layout, 8)
    grow(slot, stage, BLUEPRINT[layout], ramp, style=style)
    return slot


def gate_by_hand(gate: SampleGate, h: np.ndarray, layout: Layout) -> np.ndarray:  # [B]
    """Compute the gate sample by sample in float64: mean over positions, linear, ReLU, linear, logistic."""
    w1, b1, w2, b2 = (parameter.detach().double().numpy() for parameter in gate.parameters())
    opened = []
    for sample in h:
        channels = {"image": lambda s: s.mean((1, 2)), "sequence": lambda s: s.mean(0), "vector": lambda s: s}
        hidden = np.maximum(w1 @ channels[layout](sample) + b1, 0.0)
        opened.append(1.0 / (1.0 + np.exp(-(w2 @ hidden + b2).item())))
    return np.array(opened)


def mix_by_hand(style: BlendStyle, h: np.ndarray, s: np.ndarray, alpha: float, gate: np.ndarray) -> np.ndarray:
    if style == "multiply":
        return h * (1.0 + alpha * np.tanh(s - h))
    share = alpha * gate.reshape(-1, *[1] * (h.ndim - 1)) if style == "gate" else alpha
    return (1.0 - share) * h + share * s


@pytest.mark.parametrize("alpha", [0.0, 0.125, 0.5, 0.7, 1.0])
@every_style
@every_layout
def test_a_style_is_its_formula_in_double_precision(layout: Layout, style: BlendStyle, alpha: float) -> None:
    slot, x = grown_slot(layout, style).double(), feature(layout, torch.float64)
    slot.alpha.fill_(alpha)
    h, s = x.numpy(), slot.seed(x).detach().numpy()
    gate = gate_by_hand(slot.seed.gate, h, layout) if style == "gate" else np.empty(0)
    np.testing.assert_allclose(slot(x).detach().numpy(), mix_by_hand(style, h, s, alpha, gate), rtol=1e-12, atol=1e-12)
    assert alpha or torch.equal(slot(x), x), "exactly the host at alpha 0"
    slot.move_to(Stage.FOSSILIZED)
    np.testing.assert_allclose(slot(x).detach().numpy(), mix_by_hand(style, h, s, 1.0, gate), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("host", "seed"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")])
def test_the_host_keeps_its_precision_and_its_numbers_whatever_the_seeds(host: str, seed: str) -> None:
    h, s = feature("vector", getattr(torch, host)), 3.0 * feature("vector", getattr(torch, seed))
    nothing, everything = torch.zeros(()), torch.ones(())
    gate = torch.rand(3, 1, generator=generator_of(1)).to(s.dtype)
    for blended in (add(h, s, nothing), add(h, s, nothing * gate), multiply(h, s, h, alpha=nothing)):
        assert blended.dtype == h.dtype
        assert torch.equal(blended, h)
    assert torch.equal(add(h, s, everything), s.to(h.dtype))


@every_style
@every_layout
def test_under_autocast_a_training_seed_learns_and_leaves_the_host_alone(layout: Layout, style: BlendStyle) -> None:
    slot, x = grown_slot(layout, style, Stage.TRAINING), feature(layout).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = slot(x)
    y.square().sum().backward()
    assert torch.equal(bits(y), bits(x))
    assert torch.equal(x.grad, 2 * x)
    assert all(p.grad.any() for p in slot.seed.parameters())


@pytest.mark.parametrize("seed_value", AWKWARD)
def test_straight_through_returns_the_hosts_feature_bit_for_bit(seed_value: float) -> None:
    h = torch.tensor(AWKWARD)
    assert torch.equal(bits(straight_through(h, torch.full_like(h, seed_value))), bits(h))


@given(h=finite, s=finite, alpha=st.floats(0, 1, width=32))
def test_adding_and_multiplying_keep_their_bounds_and_are_exact_at_the_ends(h: float, s: float, alpha: float) -> None:
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    assert torch.equal(add(row(h), row(s), zero), row(h))
    assert torch.equal(add(row(h), row(s), one), row(s))
    assert torch.equal(multiply(row(h), row(s), row(h), alpha=zero), row(h))
    blended = add(scalar(h), scalar(s), torch.tensor(alpha)).item()
    assert min(h, s) - 1e-5 * max(abs(h), abs(s)) <= blended <= max(h, s) + 1e-5 * max(abs(h), abs(s))
    factor = multiply(scalar(h), scalar(s), scalar(h), alpha=torch.tensor(alpha)).item() / h if h else 1.0
    assert 0.0 <= factor <= 2.0 + 1e-6


@every_layout
def test_the_gate_opens_for_each_sample_by_itself(layout: Layout) -> None:
    gate = new_seed(SeedSlot("place", layout, 8), BLUEPRINT[layout], "gate", generator=generator_of()).gate
    add_noise(gate, seed=4, scale=2.0)
    h = feature(layout)
    opened = gate(h)
    assert opened.shape == (3, *[1] * (h.ndim - 1))
    assert len(set(opened.flatten().tolist())) == 3
    np.testing.assert_allclose(opened.flatten().detach(), gate_by_hand(gate, h.double().numpy(), layout), rtol=1e-5)
    changed = h.clone()
    changed[0] += 1.0
    assert torch.allclose(gate(changed)[1:], opened[1:])
    assert not torch.allclose(gate(changed)[:1], opened[:1])


# Ramps of alpha.


@pytest.mark.parametrize("curve", get_args(Curve))
@pytest.mark.parametrize("ticks", [0, 1, 2, 7, 300])
def test_a_ramp_rises_at_every_tick_from_exactly_0_to_exactly_1(curve: Curve, ticks: int) -> None:
    values = [Ramp(ticks, curve).value(tick) for tick in range(max(1, ticks) + 1)]
    assert (values[0], values[-1], Ramp(ticks, curve).value(ticks + 5)) == (0.0, 1.0, 1.0)
    assert all(earlier < later for earlier, later in pairwise(values))
    assert [1.0 - value for value in reversed(values)] == pytest.approx(values, abs=1e-12), "symmetric"
