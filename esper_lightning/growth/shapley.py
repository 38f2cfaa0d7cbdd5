"""Shapley values and interactions of seeds, exact or sampled, with k players (slots).

v(S), the value of a coalition S, is the score of the network with the seeds S; see `measure_variants`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from esper_lightning.growth.counterfactual import SeedVariant, all_variants

MAX_EXACT = 4
"""Maximum number of players for which all 2^k coalitions are evaluated; with more, orders are sampled."""


def shapley_values(coalition_values: Mapping[SeedVariant, float], players: Sequence[str]) -> dict[str, float]:
    """Return exact Shapley values from the values of all 2^k coalitions (Shapley 1953, doi:10.1515/9781400881970-018).

    A Shapley value is the mean marginal value of a player over all orders of joining. They sum to v(all) - v(none).
    """
    k = len(players)

    def shapley_value(player: str) -> float:
        others = [other for other in players if other != player]
        return math.fsum(
            (coalition_values[coalition | {player}] - coalition_values[coalition])
            / (k * math.comb(k - 1, len(coalition)))
            for coalition in all_variants(others)
        )

    return {player: shapley_value(player) for player in players}


def interactions(coalition_values: Mapping[SeedVariant, float], players: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return the Shapley interaction index of every pair (Grabisch & Roubens 1999, doi:10.1007/s001820050125).

    Positive: the two players are worth more together than separately; negative: one can replace the other.
    """
    k = len(players)

    def index(a: str, b: str) -> float:
        others = [other for other in players if other not in (a, b)]
        return math.fsum(
            (coalition_values[s | {a, b}] - coalition_values[s | {a}] - coalition_values[s | {b}] + coalition_values[s])
            / ((k - 1) * math.comb(k - 2, len(s)))
            for s in all_variants(others)
        )

    return {(a, b): index(a, b) for a, b in combinations(players, 2)}


class Credit(NamedTuple):
    """Shapley value of a player with its standard error."""

    value: float
    error: float
    """Standard error; 0 if the value is exact."""


def sampled_shapley(
    value_function: Callable[[list[SeedVariant]], Sequence[float]],
    players: Sequence[str],
    pairs: int,
    *,
    rng: np.random.Generator,
) -> dict[str, Credit]:
    """Return Shapley values estimated from random orders, each with its reverse (https://arxiv.org/abs/2104.12199).

    A player that comes early in an order comes late in its reverse, and the average of both lowers the variance. Pairs
    of orders are independent, so the standard error is taken over pairs. The values always sum to v(all) - v(none).

    Args:
        value_function: Function from coalitions to their values; called once, with all distinct coalitions.
        players: Names of the players.
        pairs: Number of pairs of orders, at least 2; each adds at most 2·(k - 1) coalitions of the
            k players.
        rng: Generator of the orders.

    Raises:
        ValueError: `pairs` is less than 2.
    """
    if pairs < 2:
        raise ValueError(f"sampled Shapley values need at least 2 pairs of orders for a standard error, got {pairs}")
    drawn = [rng.permutation(len(players)) for _ in range(pairs)]
    both_ways = [order for permutation in drawn for order in (permutation, permutation[::-1])]
    orders = [[players[int(i)] for i in order] for order in both_ways]
    chains = [[frozenset(order[:n]) for n in range(len(players) + 1)] for order in orders]
    distinct = list(dict.fromkeys(coalition for chain in chains for coalition in chain))
    values = dict(zip(distinct, value_function(distinct), strict=True))
    marginal = np.empty((2 * pairs, len(players)))
    for row, order, chain in zip(marginal, orders, chains, strict=True):
        for n, player in enumerate(order):
            row[players.index(player)] = values[chain[n + 1]] - values[chain[n]]
    means = marginal.reshape(pairs, 2, -1).mean(1)  # [pairs, k]
    errors = means.std(0, ddof=1) / math.sqrt(pairs)
    return {p: Credit(float(v), float(e)) for p, v, e in zip(players, means.mean(0), errors, strict=True)}


class CreditAllocation(NamedTuple):
    """Allocation of the value of all players to the individual players."""

    coalition_values: dict[SeedVariant, float]
    """Value of every coalition if all were evaluated; otherwise empty."""
    credit: dict[str, Credit]
    """Shapley value of each player."""
    interactions: dict[tuple[str, str], float] | None
    """Interaction index of every pair. None: too many players to compute it."""

    def interaction_of(self, player: str) -> float | None:
        """Return the sum of a player's interactions with all others; None if they are unknown."""
        if self.interactions is None:
            return None
        return sum(value for pair, value in self.interactions.items() if player in pair)


def allocate_credit(
    value_function: Callable[[list[SeedVariant]], Sequence[float]],
    players: Sequence[str],
    pairs: int,
    *,
    rng: np.random.Generator,
) -> CreditAllocation:
    """Return exact Shapley values for up to MAX_EXACT players, sampled for more. Arguments: see `sampled_shapley`."""
    if len(players) > MAX_EXACT:
        return CreditAllocation({}, sampled_shapley(value_function, players, pairs, rng=rng), None)
    coalitions = all_variants(players)
    coalition_values = dict(zip(coalitions, value_function(coalitions), strict=True))
    exact_credit = {player: Credit(value, 0.0) for player, value in shapley_values(coalition_values, players).items()}
    return CreditAllocation(coalition_values, exact_credit, interactions(coalition_values, players))


def credit(
    value_function: Callable[[list[SeedVariant]], Sequence[float]],
    players: Sequence[str],
    pairs: int,
    *,
    rng: np.random.Generator,
) -> dict[str, Credit]:
    """Return only the Shapley values of `allocate_credit`. Arguments: see `sampled_shapley`."""
    return allocate_credit(value_function, players, pairs, rng=rng).credit
