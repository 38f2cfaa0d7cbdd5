"""Credit of seeds that work together: Shapley values and interactions, exact or sampled. k players (slots).

v(S) is what the network is worth with the seeds S; see `counterfactual.measure_variants`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from esper_lightning.growth.counterfactual import Variant, full_family

MAX_EXACT = 4
"""Most players for which all 2^k combinations are worth a pass; more are sampled."""


def shapley_values(worth: Mapping[Variant, float], players: Sequence[str]) -> dict[str, float]:
    """Exact Shapley values from the worth of all 2^k combinations (Shapley 1953, doi:10.1515/9781400881970-018).

    A player's mean marginal worth over all orders in which the players could have joined. They sum to v(all) - v(none).
    """
    k = len(players)

    def value(player: str) -> float:
        others = [other for other in players if other != player]
        return math.fsum(
            (worth[joined | {player}] - worth[joined]) / (k * math.comb(k - 1, len(joined)))
            for joined in full_family(others)
        )

    return {player: value(player) for player in players}


def interactions(worth: Mapping[Variant, float], players: Sequence[str]) -> dict[tuple[str, str], float]:
    """Shapley interaction index of every pair (Grabisch & Roubens 1999, doi:10.1007/s001820050125).

    Positive: the two are worth more together than apart; negative: they stand in for each other.
    """
    k = len(players)

    def index(a: str, b: str) -> float:
        others = [other for other in players if other not in (a, b)]
        return math.fsum(
            (worth[s | {a, b}] - worth[s | {a}] - worth[s | {b}] + worth[s]) / ((k - 1) * math.comb(k - 2, len(s)))
            for s in full_family(others)
        )

    return {(a, b): index(a, b) for a, b in combinations(players, 2)}


class Credit(NamedTuple):
    """A player's Shapley value."""

    value: float
    error: float
    """Standard error; 0 where the value is exact."""


def sampled_shapley(
    worth: Callable[[list[Variant]], Sequence[float]], players: Sequence[str], pairs: int, rng: np.random.Generator
) -> dict[str, Credit]:
    """Shapley values from random orders, each with its reverse (https://arxiv.org/abs/2104.12199).

    A player's places in an order and in its reverse balance, which lowers the variance; pairs of orders are
    independent, so the standard error is taken over them. The values sum to v(all) - v(none) whatever is drawn.

    Args:
        worth: Combinations -> what each is worth; asked once, for every distinct combination that the orders meet.
        players: Names.
        pairs: Pairs of orders, at least 2: each costs 2·(k - 1) combinations, less what they share.
        rng: Draws the orders.
    """
    if pairs < 2:
        raise ValueError(f"sampled Shapley values need at least 2 pairs of orders for a standard error, got {pairs}")
    drawn = [rng.permutation(len(players)) for _ in range(pairs)]
    orders = [[players[i] for i in order] for each in drawn for order in (each, each[::-1])]
    chains = [[frozenset(order[:n]) for n in range(len(players) + 1)] for order in orders]
    distinct = list(dict.fromkeys(joined for chain in chains for joined in chain))
    values = dict(zip(distinct, worth(distinct), strict=True))
    marginal = np.empty((2 * pairs, len(players)))
    for row, order, chain in zip(marginal, orders, chains, strict=True):
        for n, player in enumerate(order):
            row[players.index(player)] = values[chain[n + 1]] - values[chain[n]]
    means = marginal.reshape(pairs, 2, -1).mean(1)  # [pairs, k]
    errors = means.std(0, ddof=1) / math.sqrt(pairs)
    return {p: Credit(float(v), float(e)) for p, v, e in zip(players, means.mean(0), errors, strict=True)}


class Shares(NamedTuple):
    """How what all players are worth together is divided among them."""

    worth: dict[Variant, float]
    """Of every combination, where all were measured; else empty."""
    credit: dict[str, Credit]
    interactions: dict[tuple[str, str], float] | None
    """Of every pair. None: there are too many players to know."""

    def interaction_of(self, player: str) -> float | None:
        """Sum of a player's interactions with all others."""
        if self.interactions is None:
            return None
        return sum(value for pair, value in self.interactions.items() if player in pair)


def share_out(
    worth: Callable[[list[Variant]], Sequence[float]], players: Sequence[str], pairs: int, rng: np.random.Generator
) -> Shares:
    """Exact for up to MAX_EXACT players, sampled for more. Arguments: see `sampled_shapley`."""
    if len(players) > MAX_EXACT:
        return Shares({}, sampled_shapley(worth, players, pairs, rng), None)
    family = full_family(players)
    known = dict(zip(family, worth(family), strict=True))
    exact = {player: Credit(value, 0.0) for player, value in shapley_values(known, players).items()}
    return Shares(known, exact, interactions(known, players))


def credit(
    worth: Callable[[list[Variant]], Sequence[float]], players: Sequence[str], pairs: int, rng: np.random.Generator
) -> dict[str, Credit]:
    """Shapley values alone, of `share_out`."""
    return share_out(worth, players, pairs, rng).credit
