"""Blending of a seed's output into the host's feature."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper_lightning.growth.alpha import DEFAULT_RAMP, Ramp
from esper_lightning.growth.blend import BlendStyle, GatedSeed, SampleGate, add, multiply, straight_through
from esper_lightning.growth.lifecycle import count_parameters, cull
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


def grown_slot(
    layout: Layout, style: BlendStyle, stage: Stage = Stage.PROBATIONARY, ramp: Ramp = DEFAULT_RAMP
) -> SeedSlot:
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


@every_style
@every_layout
def test_a_full_fossil_says_what_its_formula_says_at_alpha_1(layout: Layout, style: BlendStyle) -> None:
    slot, x = grown_slot(layout, style, Stage.FOSSILIZED).double(), feature(layout, torch.float64)
    h, s = x.numpy(), slot.seed(x).detach().numpy()
    gate = gate_by_hand(slot.seed.gate, h, layout) if style == "gate" else np.empty(0)
    np.testing.assert_allclose(slot(x).detach().numpy(), mix_by_hand(style, h, s, 1.0, gate), rtol=1e-12, atol=1e-12)


@every_style
@every_layout
def test_every_style_is_the_host_exactly_at_alpha_0(layout: Layout, style: BlendStyle) -> None:
    slot, x = grown_slot(layout, style), feature(layout)
    slot.alpha.zero_()
    assert torch.equal(slot(x), x)
    slot.alpha.fill_(0.5)
    assert not torch.equal(slot(x), x)


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
def test_under_autocast_alpha_0_is_still_the_host_exactly(layout: Layout, style: BlendStyle) -> None:
    slot, x = grown_slot(layout, style), feature(layout)
    slot.alpha.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        y = slot(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, x)


def test_under_autocast_a_full_fossil_keeps_the_hosts_precision() -> None:
    slot, x = grown_slot("vector", "add", Stage.FOSSILIZED), feature("vector")
    slot.seed = slot.seed.body  # a custom seed without the residual sum, which would have the feature's dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert slot.seed(x).dtype == torch.bfloat16
        y = slot(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, slot(x), rtol=0.05, atol=0.05)


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


@pytest.mark.parametrize("seed_value", [0.5, float("inf"), float("nan")])
def test_straight_through_hands_the_gradient_to_host_and_seed_alike(seed_value: float) -> None:
    h = torch.randn(2, 3, generator=generator_of(1), requires_grad=True)
    s = torch.full((2, 3), seed_value, requires_grad=True)
    arriving = torch.tensor([[1.0, -2.0, 0.3], [0.0, 1e-30, 7.0]])
    straight_through(h, s).backward(arriving)
    assert torch.equal(h.grad, arriving)
    assert torch.equal(s.grad, arriving)


def test_straight_through_hands_each_its_gradient_in_its_own_precision() -> None:
    h = torch.ones(3, requires_grad=True)
    s = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    y = straight_through(h, s)
    y.backward(torch.tensor([1.0, 0.1, -3.0]))
    assert y.dtype == h.grad.dtype == torch.float32
    assert torch.equal(s.grad, torch.tensor([1.0, 0.1, -3.0], dtype=torch.bfloat16))


def test_a_feature_that_needs_no_gradient_still_lets_the_seed_learn() -> None:
    images = torch.randn(2, 3, generator=generator_of(1))  # a slot directly after the input
    seed = nn.Linear(3, 3)
    straight_through(images, seed(images)).sum().backward()
    assert all(parameter.grad.any() for parameter in seed.parameters())


@given(h=finite, s=finite)
def test_adding_is_the_host_at_alpha_0_and_the_seed_at_alpha_1(h: float, s: float) -> None:
    assert torch.equal(add(row(h), row(s), torch.tensor(0.0)), row(h))
    assert torch.equal(add(row(h), row(s), torch.tensor(1.0)), row(s))


@given(h=finite, s=finite)
def test_multiplying_is_the_host_at_alpha_0(h: float, s: float) -> None:
    assert torch.equal(multiply(row(h), row(s), row(h), alpha=torch.tensor(0.0)), row(h))


@given(h=st.floats(-10, 10, width=32), s=st.floats(-10, 10, width=32), alpha=st.floats(0, 1, width=32))
def test_adding_stays_between_host_and_seed(h: float, s: float, alpha: float) -> None:
    blended = add(scalar(h), scalar(s), torch.tensor(alpha)).item()
    assert min(h, s) - 1e-5 <= blended <= max(h, s) + 1e-5


@given(h=finite, s=finite, alpha=st.floats(0, 1, width=32))
def test_multiplying_neither_turns_a_number_round_nor_more_than_doubles_it(h: float, s: float, alpha: float) -> None:
    factor = multiply(scalar(h), scalar(s), scalar(h), alpha=torch.tensor(alpha)).item() / h if h else 1.0
    assert 0.0 <= factor <= 2.0 + 1e-6


def test_adding_shares_values_and_gradients_by_alpha() -> None:
    h, s = scalar(2.0), scalar(10.0)
    blended = add(h, s, torch.tensor(0.25))
    blended.backward()
    assert blended.item() == 4.0
    assert (h.grad.item(), s.grad.item()) == (0.75, 0.25)


def test_a_seed_that_multiplies_and_agrees_with_the_host_changes_nothing_but_learns() -> None:
    h, s = scalar(2.0), scalar(2.0)
    blended = multiply(h, s, h.detach(), alpha=torch.tensor(0.25))
    blended.backward()
    assert blended.item() == 2.0
    assert (h.grad.item(), s.grad.item()) == (1.0, 2.0 * 0.25)  # ds: h·alpha·(1 - tanh²(0))


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


@every_layout
def test_the_gate_does_not_care_for_the_order_of_positions(layout: Layout) -> None:
    h = feature(layout)
    gate = new_seed(SeedSlot("place", layout, 8), BLUEPRINT[layout], "gate", generator=generator_of()).gate
    turned = {"image": lambda: h.flip((2, 3)), "sequence": lambda: h.flip(1), "vector": lambda: h}[layout]()
    torch.testing.assert_close(gate(turned), gate(h))


@pytest.mark.parametrize(("width", "inner"), [(1, 8), (4, 8), (32, 8), (36, 9), (64, 16)])
def test_the_gate_has_the_size_it_should(width: int, inner: int) -> None:
    assert count_parameters(SampleGate(width, 1)) == (width + 1) * inner + inner + 1


@every_layout
def test_the_gate_travels_with_its_seed(layout: Layout) -> None:
    plain, gated = grown_slot(layout, "add"), grown_slot(layout, "gate")
    assert count_parameters(gated) == count_parameters(plain) + (8 + 1) * 8 + 8 + 1
    assert isinstance(gated.seed, GatedSeed)
    kept = [name for name in gated.state_dict() if name.startswith("seed.gate.")]
    assert len(kept) == 4
    cull(gated)
    assert list(gated.parameters()) == []


def test_a_gated_seed_and_a_plain_one_from_one_generator_are_the_same_seed() -> None:
    slot = SeedSlot("place", "image", 8)

    def make(style: BlendStyle) -> nn.Module:
        return new_seed(slot, "conv_heavy", style, generator=generator_of(5))

    plain, gated = make("add").state_dict(), make("gate").seed.state_dict()
    assert all(torch.equal(plain[name], gated[name]) for name in plain)
