"""Shapley values and interactions compared with their definitions and with all orders of joining."""

import math
from collections.abc import Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_lightning.growth.counterfactual import SeedVariant, all_variants, interactions, shapley_values

Game = dict[SeedVariant, float]

worths = st.floats(-100.0, 100.0, allow_nan=False)


@st.composite
def games(draw: st.DrawFn, least: int = 0, most: int = 4) -> tuple[Game, list[str]]:
    """Draw arbitrary values of all coalitions of a few players."""
    players = [f"block{i}.pool" for i in range(draw(st.integers(least, most)))]
    return {joined: draw(worths) for joined in all_variants(players)}, players


def over_all_orders(worth: Game, players: Sequence[str]) -> dict[str, float]:
    """Return each player's marginal value, averaged over every order of joining."""
    orders = list(permutations(players))
    return {
        player: math.fsum(
            worth[frozenset(order[: order.index(player) + 1])] - worth[frozenset(order[: order.index(player)])]
            for order in orders
        )
        / len(orders)
        for player in players
    }


def interaction_over_all_orders(worth: Game, players: Sequence[str], a: str, b: str) -> float:
    """Return the joint marginal value of a pair minus the separate ones, averaged over every order of joining."""
    orders = list(permutations(player for player in players if player != b))
    total = 0.0
    for order in orders:
        before = frozenset(order[: order.index(a)])
        total += worth[before | {a, b}] - worth[before | {a}] - worth[before | {b}] + worth[before]
    return total / len(orders)


@given(games())
def test_exact_values_are_the_mean_over_all_orders_and_sum_to_the_whole_gain(game: tuple[Game, list[str]]) -> None:
    worth, players = game
    values = shapley_values(worth, players)
    assert values == pytest.approx(over_all_orders(worth, players), rel=1e-9, abs=1e-9)
    gain = worth[frozenset(players)] - worth[frozenset()]
    assert math.fsum(values.values()) == pytest.approx(gain, rel=1e-6, abs=1e-9)


@given(games())
def test_interactions_are_the_mean_over_all_orders_in_which_a_pair_joins_as_one(game: tuple[Game, list[str]]) -> None:
    worth, players = game
    measured = interactions(worth, players)
    assert list(measured) == list(combinations(players, 2))
    for (a, b), index in measured.items():
        assert index == pytest.approx(interaction_over_all_orders(worth, players, a, b), rel=1e-9, abs=1e-9)
