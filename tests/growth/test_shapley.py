"""Shapley values compared with their definition and with all orders of joining."""

import math
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_lightning.growth.counterfactual import SeedVariant, all_variants, shapley_values

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


@given(games())
def test_exact_values_are_the_mean_over_all_orders_and_sum_to_the_whole_gain(game: tuple[Game, list[str]]) -> None:
    worth, players = game
    values = shapley_values(worth, players)
    assert values == pytest.approx(over_all_orders(worth, players), rel=1e-9, abs=1e-9)
    gain = worth[frozenset(players)] - worth[frozenset()]
    assert math.fsum(values.values()) == pytest.approx(gain, rel=1e-6, abs=1e-9)
