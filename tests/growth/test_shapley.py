"""Shapley values and interactions compared with their definitions and with all orders of joining."""

import math
from collections.abc import Sequence
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from esper_lightning.growth.alpha import Ramp
from esper_lightning.growth.counterfactual import (
    SeedVariant,
    all_variants,
    interactions,
    measure_variants,
    shapley_values,
)
from esper_lightning.growth.stages import Stage
from tests.growth.grown import grow, slot_named, small_batch, small_cnn

Game = dict[SeedVariant, float]

NONE: SeedVariant = frozenset()

worths = st.floats(-100.0, 100.0, allow_nan=False)


def players_of(k: int) -> list[str]:
    return [f"block{i}.pool" for i in range(k)]


def subsets(players: Sequence[str]) -> list[SeedVariant]:
    return [frozenset(chosen) for n in range(len(players) + 1) for chosen in combinations(players, n)]


@st.composite
def games(draw: st.DrawFn, least: int = 0, most: int = 4) -> tuple[Game, list[str]]:
    """Draw arbitrary values of all coalitions of a few players."""
    players = players_of(draw(st.integers(least, most)))
    return {joined: draw(worths) for joined in subsets(players)}, players


def random_game(k: int, seed: int = 0) -> tuple[Game, list[str]]:
    rng, players = np.random.default_rng(seed), players_of(k)
    return {joined: float(rng.normal()) for joined in subsets(players)}, players


def monotone_game(k: int) -> tuple[Game, list[str]]:
    """Return a game with diminishing returns: a coalition's value is the root of the sum of its players' weights."""
    players = players_of(k)
    strength = {player: 1.0 + i for i, player in enumerate(players)}
    return {joined: math.sqrt(sum(strength[p] for p in joined)) for joined in subsets(players)}, players


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
    together = [player for player in players if player != b]
    orders = list(permutations(together))
    total = 0.0
    for order in orders:
        before = frozenset(order[: order.index(a)])
        total += worth[before | {a, b}] - worth[before | {a}] - worth[before | {b}] + worth[before]
    return total / len(orders)


@given(games())
def test_exact_values_are_the_mean_over_all_orders(game: tuple[Game, list[str]]) -> None:
    worth, players = game
    assert shapley_values(worth, players) == pytest.approx(over_all_orders(worth, players), rel=1e-9, abs=1e-9)


@given(games())
def test_values_sum_to_what_all_are_worth_more_than_none(game: tuple[Game, list[str]]) -> None:
    worth, players = game
    gain = worth[frozenset(players)] - worth[NONE]
    assert math.fsum(shapley_values(worth, players).values()) == pytest.approx(gain, rel=1e-6, abs=1e-9)


@given(games(least=2), st.data())
def test_players_that_do_the_same_earn_the_same(game: tuple[Game, list[str]], data: st.DataObject) -> None:
    worth, players = game
    a, b = data.draw(st.permutations(players))[:2]
    swap = {a: b, b: a}
    same = {joined: worth[joined] + worth[frozenset(swap.get(p, p) for p in joined)] for joined in worth}
    values = shapley_values(same, players)
    assert values[a] == pytest.approx(values[b], rel=1e-9, abs=1e-9)


@given(games(least=1), worths, st.data())
def test_a_player_that_always_adds_the_same_earns_just_that(
    game: tuple[Game, list[str]], wage: float, data: st.DataObject
) -> None:
    worth, players = game
    lone = data.draw(st.sampled_from(players))
    with_wage = {joined: worth[joined - {lone}] + wage * (lone in joined) for joined in worth}
    values = shapley_values(with_wage, players)
    assert values[lone] == pytest.approx(wage, rel=1e-9, abs=1e-9)
    others = [player for player in players if player != lone]
    alone = shapley_values({joined: worth[joined] for joined in subsets(others)}, others)
    assert {player: values[player] for player in others} == pytest.approx(alone, rel=1e-9, abs=1e-9)


@given(games(least=3, most=3), games(least=3, most=3), st.floats(-3.0, 3.0))
def test_values_of_a_sum_of_games_are_the_sum_of_values(
    one: tuple[Game, list[str]], other: tuple[Game, list[str]], share: float
) -> None:
    (first, players), (second, _) = one, other
    values, more = shapley_values(first, players), shapley_values(second, players)
    both = shapley_values({joined: first[joined] + share * second[joined] for joined in first}, players)
    expected = {player: values[player] + share * more[player] for player in players}
    assert both == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_values_of_two_gloves_by_hand() -> None:
    # Left, right, right: a pair of gloves is worth 1. The left glove is in every pair: it joins last, or second behind
    # a right one, in 4 of 6 orders. Each right glove makes the pair in 1 of 6.
    players = ["left", "right", "spare"]
    worth = {joined: float("left" in joined and len(joined) > 1) for joined in subsets(players)}
    assert shapley_values(worth, players) == pytest.approx({"left": 4 / 6, "right": 1 / 6, "spare": 1 / 6})


def test_interactions_of_two_and_of_three_by_hand() -> None:
    worth, (a, b) = random_game(2)
    only = worth[frozenset({a, b})] - worth[frozenset({a})] - worth[frozenset({b})] + worth[NONE]
    assert interactions(worth, [a, b]) == {(a, b): pytest.approx(only)}

    worth, players = random_game(3)
    measured = interactions(worth, players)
    assert list(measured) == list(combinations(players, 2))
    for a, b in measured:
        (c,) = set(players) - {a, b}

        def together(*others: str, a: str = a, b: str = b) -> float:
            rest = frozenset(others)
            return worth[rest | {a, b}] - worth[rest | {a}] - worth[rest | {b}] + worth[rest]

        assert measured[a, b] == pytest.approx((together() + together(c)) / 2)


@given(games())
def test_interactions_are_the_mean_over_all_orders_in_which_a_pair_joins_as_one(game: tuple[Game, list[str]]) -> None:
    worth, players = game
    measured = interactions(worth, players)
    assert list(measured) == list(combinations(players, 2))
    for (a, b), index in measured.items():
        assert index == pytest.approx(interaction_over_all_orders(worth, players, a, b), rel=1e-9, abs=1e-9)


def test_help_is_positive_and_doing_the_same_work_is_negative() -> None:
    players = ["a", "b", "c"]
    both = {joined: float({"a", "b"} <= joined) for joined in subsets(players)}
    either = {joined: float(bool({"a", "b"} & joined)) for joined in subsets(players)}
    assert interactions(both, players) == {("a", "b"): 1.0, ("a", "c"): 0.0, ("b", "c"): 0.0}
    assert interactions(either, players) == {("a", "b"): -1.0, ("a", "c"): 0.0, ("b", "c"): 0.0}


def test_values_of_seeds_in_a_network_sum_to_what_they_gain_together() -> None:
    places = ["block1", "block2.pool", "block3.pool"]
    network = small_cnn(places)
    network(small_batch(64)[0])  # moves BatchNorm's statistics
    for number, place in enumerate(places):
        grow(slot_named(network, place), Stage.FOSSILIZED, "conv_light", Ramp(0.0, 0.7, 1, "linear"), seed=number)
    batches = [small_batch(samples, seed) for seed, samples in enumerate([40, 24, 7])]

    def accuracy(outputs: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == digits).double()

    def likelihood(outputs: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
        return -F.cross_entropy(outputs, digits, reduction="none").double()

    for score in (accuracy, likelihood):
        family = all_variants(places)
        worth = dict(zip(family, measure_variants(network, family, batches, score=score).tolist(), strict=True))
        gain = worth[frozenset(places)] - worth[NONE]
        values = shapley_values(worth, places)
        assert gain != 0.0
        assert sum(values.values()) == pytest.approx(gain, abs=1e-6)
        assert values == pytest.approx(over_all_orders(worth, places))
