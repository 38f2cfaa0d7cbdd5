"""Exact Shapley values and interactions of seeds, with k players (slots).

v(S), the value of a coalition S, is the score of the network with the seeds S; see `measure_variants`.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

from esper_lightning.growth.counterfactual import SeedVariant, all_variants


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
