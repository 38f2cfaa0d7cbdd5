"""The objective J = accuracy - rent, against hand-computed numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper_lightning.rewards import ObjectiveConfig, objective, rent

CONFIG = ObjectiveConfig(price=0.05)

HOST = 1000

LN_2 = 0.6931472

prices = st.floats(0.001, 10.0)
caps = st.floats(0.0, 2.0)
hosts = st.integers(1, 10**7)
added = st.integers(0, 10**7)


def float_tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


def test_rent_is_the_price_of_each_growth_by_a_factor_of_e() -> None:
    grown = float_tensor(2000, 2718.2818, 8000, 1001)
    expected = float_tensor(0.05 * LN_2, 0.05, 0.05 * 3 * LN_2, 0.05 * 0.0009995)
    torch.testing.assert_close(rent(grown, HOST, CONFIG), expected, rtol=1e-4, atol=0.0)


def test_growth_of_a_tiny_host_is_counted_against_200_parameters() -> None:
    # 77 + 200 parameters are a growth by 1, as for a host of 200; counted against 77 it would be 2.6.
    assert rent(float_tensor(277), 77, CONFIG).item() == pytest.approx(0.05 * LN_2)
    assert rent(float_tensor(400), 200, CONFIG).item() == pytest.approx(0.05 * LN_2)
    assert rent(float_tensor(402), 201, CONFIG).item() == pytest.approx(0.05 * LN_2)


def test_rent_stops_at_its_cap_exactly() -> None:
    config = ObjectiveConfig(price=1.0, rent_cap=0.5)
    charged = rent(float_tensor(1000, 1500, 1700, 10**9), HOST, config)
    assert charged.tolist() == pytest.approx([0.0, 0.4054651, 0.5, 0.5])
    assert charged[-1].item() == 0.5


def test_by_default_no_network_is_worth_less_than_minus_one() -> None:
    worst = objective(float_tensor(0.0), float_tensor(1e30), 1, config=ObjectiveConfig(price=100.0))
    assert worst.item() == -1.0


def test_the_objective_is_accuracy_minus_rent() -> None:
    worth = objective(float_tensor(0.5, 0.9, 0.9), float_tensor(1000, 1000, 2000), HOST, config=CONFIG)
    torch.testing.assert_close(worth, float_tensor(0.5, 0.9, 0.8653426))


@given(host=hosts, few=added, more=added, price=prices, cap=caps)
def test_rent_never_falls_with_size_and_stays_between_nothing_and_its_cap(
    host: int, few: int, more: int, price: float, cap: float
) -> None:
    sizes = torch.tensor([host, host + min(few, more), host + max(few, more)], dtype=torch.float64)
    nothing, less, most = rent(sizes, host, ObjectiveConfig(price=price, rent_cap=cap)).tolist()
    assert 0.0 == nothing <= less <= most <= cap


@given(host=hosts, extra=st.integers(1, 10**7), price=prices)
def test_below_the_cap_every_parameter_costs_something(host: int, extra: int, price: float) -> None:
    config = ObjectiveConfig(price=price, rent_cap=1e9)
    sizes = torch.tensor([host + extra - 1, host + extra], dtype=torch.float64)
    fewer, more = objective(torch.full((2,), 0.5, dtype=torch.float64), sizes, host, config=config).tolist()
    assert more < fewer


@pytest.mark.parametrize("name", ["price", "price_to", "compute_price", "compute_price_to", "rent_cap"])
@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
def test_prices_and_caps_are_finite_and_not_negative(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"objective.{name} must be finite and not negative, got {value}"):
        ObjectiveConfig(**{name: value})
