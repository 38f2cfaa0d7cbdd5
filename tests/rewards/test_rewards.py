"""The objective J = score - rent and the rewards of the package, against hand-computed numbers."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper_lightning.envs.rewards import RewardConfig, compute_terms, objective, rent
from tests.rewards.ticks import host_step

HOST = 1000
PRICE = 0.05
LN_2 = 0.6931472


def float_tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


def test_the_objective_is_score_minus_rent_for_each_growth_by_a_factor_of_e_up_to_a_cap() -> None:
    grown = float_tensor(2000, 2718.2818, 8000, 1001)
    expected = float_tensor(PRICE * LN_2, PRICE, PRICE * 3 * LN_2, PRICE * 0.0009995)
    torch.testing.assert_close(rent(grown, HOST, PRICE), expected, rtol=1e-4, atol=0.0)
    assert rent(float_tensor(1500, 10**9), HOST, 1.0).tolist() == pytest.approx([0.4054651, 1.0])
    assert objective(float_tensor(0.0), float_tensor(1e30), 1, 100.0).item() == -1.0
    worth = objective(float_tensor(0.5, 0.9, 0.9), float_tensor(1000, 1000, 2000), HOST, PRICE)
    torch.testing.assert_close(worth, float_tensor(0.5, 0.9, 0.8653426))


def test_growth_of_a_tiny_host_is_counted_against_200_parameters() -> None:
    # 77 + 200 parameters are a growth by 1, as for a host of 200; counted against 77 it would be 2.6.
    for grown, host in ((277, 77), (400, 200), (402, 201)):
        assert rent(float_tensor(grown), host, PRICE).item() == pytest.approx(PRICE * LN_2)


@given(host=st.integers(1, 10**7), few=st.integers(0, 10**7), more=st.integers(0, 10**7), price=st.floats(0.001, 10.0))
def test_rent_never_falls_with_size_and_stays_between_nothing_and_its_cap(
    host: int, few: int, more: int, price: float
) -> None:
    sizes = torch.tensor([host, host + min(few, more), host + max(few, more)], dtype=torch.float64)
    nothing, less, most = rent(sizes, host, price).tolist()
    assert 0.0 == nothing <= less <= most <= 1.0


STEPS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "as it is": ({}, {"objective": 0.25, "kept": 0.125, "end": 0.0}),
    "at the horizon": ({"at_horizon": True}, {"objective": 0.25, "kept": 0.125, "end": 0.75}),
    "rolled back": ({"at_horizon": True, "diverged": True}, {"objective": 0.0, "kept": 0.0, "end": 0.0}),
    "over before": ({"at_horizon": True, "already_ended": True}, {"objective": 0.0, "kept": 0.0, "end": 0.0}),
}


@pytest.mark.parametrize("name", STEPS)
def test_each_reward_pays_its_term_unless_the_host_is_rolled_back_or_has_ended(name: str) -> None:
    facts, expected = STEPS[name]
    step = host_step(objective=0.75, fossilized_objective=0.625, **facts)
    paid = [compute_terms(step, RewardConfig(mode=mode)) for mode in ("objective", "kept", "sparse")]
    assert paid == [{term: value} for term, value in expected.items()]
