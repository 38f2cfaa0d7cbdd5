"""How a seed's output meets the host's feature."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper_lightning.growth.blend import add, straight_through
from tests.growth.grown import seeded

AWKWARD = [0.0, -0.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"), 1.0]

finite = st.floats(-(2.0**60), 2.0**60, width=32)


def bits(x: Tensor) -> Tensor:
    """The numbers as integers: tells 0 from -0, and lets NaN equal itself."""
    return x.detach().view(torch.int32)


def row(value: float) -> Tensor:
    return torch.full((17,), value)  # vector instructions for 16 elements, and one left over


def scalar(value: float) -> Tensor:
    return torch.tensor([value], requires_grad=True)


@pytest.mark.parametrize("seed_value", AWKWARD)
def test_straight_through_returns_the_hosts_feature_bit_for_bit(seed_value: float) -> None:
    h = torch.tensor(AWKWARD)
    assert torch.equal(bits(straight_through(h, torch.full_like(h, seed_value))), bits(h))


@pytest.mark.parametrize("seed_value", [0.5, float("inf"), float("nan")])
def test_straight_through_hands_the_gradient_to_host_and_seed_alike(seed_value: float) -> None:
    h = torch.randn(2, 3, generator=seeded(1), requires_grad=True)
    s = torch.full((2, 3), seed_value, requires_grad=True)
    arriving = torch.tensor([[1.0, -2.0, 0.3], [0.0, 1e-30, 7.0]])
    straight_through(h, s).backward(arriving)
    assert torch.equal(h.grad, arriving)
    assert torch.equal(s.grad, arriving)


def test_a_feature_that_needs_no_gradient_still_lets_the_seed_learn() -> None:
    images = torch.randn(2, 3, generator=seeded(1))  # a slot right behind the input
    seed = nn.Linear(3, 3)
    straight_through(images, seed(images)).sum().backward()
    assert all(parameter.grad.any() for parameter in seed.parameters())


@given(h=finite, s=finite)
def test_adding_is_the_host_at_alpha_0_and_the_seed_at_alpha_1(h: float, s: float) -> None:
    assert torch.equal(add(row(h), row(s), torch.tensor(0.0)), row(h))
    assert torch.equal(add(row(h), row(s), torch.tensor(1.0)), row(s))


@given(h=st.floats(-10, 10, width=32), s=st.floats(-10, 10, width=32), alpha=st.floats(0, 1, width=32))
def test_adding_stays_between_host_and_seed(h: float, s: float, alpha: float) -> None:
    blended = add(scalar(h), scalar(s), torch.tensor(alpha)).item()
    assert min(h, s) - 1e-5 <= blended <= max(h, s) + 1e-5


def test_adding_shares_values_and_gradients_by_alpha() -> None:
    h, s = scalar(2.0), scalar(10.0)
    blended = add(h, s, torch.tensor(0.25))
    blended.backward()
    assert blended.item() == 4.0
    assert (h.grad.item(), s.grad.item()) == (0.75, 0.25)
