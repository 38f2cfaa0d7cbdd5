"""Credit of each fossilized seed by three measures: ablation, Shapley value and matched continuation without it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from esper_lightning.envs import HostPool
from esper_lightning.evaluation.fork import matched_fork
from esper_lightning.evaluation.intervals import Interval
from esper_lightning.growth.counterfactual import Variant, leave_one_out
from esper_lightning.growth.shapley import Credit, share_out


@dataclass(frozen=True, kw_only=True)
class CreditConfig:
    """Number of hosts whose fossilized seeds are analysed, and the precision of the analysis."""

    hosts: int = 0
    """Number of evaluated hosts whose fossilized seeds are analysed, counted from the first. 0: none."""

    fork_ticks: int = 3
    """Host epochs for which a host continues with and without a seed."""

    repetitions: int = 4
    """Matched pairs of continuations per seed."""

    pairs: int = 16
    """Pairs of random orders in the estimate of Shapley values, for hosts with more than four fossilized seeds."""

    def __post_init__(self) -> None:
        if self.hosts < 0 or self.fork_ticks < 0:
            raise ValueError(
                f"credit: hosts and fork_ticks must not be negative, got {self.hosts} and {self.fork_ticks}"
            )
        if self.repetitions < 2 or self.pairs < 2:
            raise ValueError(
                f"credit: repetitions and pairs must be at least 2 (for an interval), got {self.repetitions} and "
                f"{self.pairs}"
            )


class SeedCredit(NamedTuple):
    """Credit of one fossilized seed, in accuracy points (of 100) on the test split."""

    host: int
    slot: str
    blueprint: str
    contribution: float
    """Accuracy of the host minus its accuracy with this seed switched off."""
    shapley: Credit
    """Shapley value: the seed's fair share of the accuracy that all fossilized seeds add."""
    interaction: float | None
    """Sum of the interactions with the other fossilized seeds; negative if their effects overlap.
    None if there are too many seeds to compute it."""
    effect: Interval
    """Causal effect: accuracy after continuing with the seed minus accuracy after continuing without it."""


def credit_seeds(pool: HostPool, pairs_pool: HostPool, config: CreditConfig) -> list[SeedCredit]:
    """Measure the credit of the fossilized seeds of the pool's first hosts.

    Seeds that are not fossilized are removed, as always at the end of an episode.

    Args:
        pool: Hosts whose episode has ended.
        fork_pool: Pool of the same kind with 2 * repetitions environments; its state is overwritten.
        config: Number of hosts and precision.
    """
    found = []
    for i, env in enumerate(pool.envs[: config.hosts]):
        for slot in env.slots:
            if slot.live:
                env.growing.remove(slot.name)
        players = [slot.name for slot in env.slots if slot.occupied]
        if not players:
            continue

        def worth(variants: list[Variant], host: int = i) -> list[float]:
            return (100.0 * pool.accuracy_of(host, variants, pool.data.test)).tolist()

        shares = share_out(worth, players, config.pairs, np.random.default_rng(i))
        without = leave_one_out(players)
        known = shares.worth or dict(zip(without, worth(without), strict=True))
        everything = frozenset(players)
        state = env.state_dict()
        for player in players:
            contribution = known[everything] - known[everything - {player}]
            effect = matched_fork(pairs_pool, state, player, config.fork_ticks).effect
            shared = shares.interaction_of(player)
            kind = env.growing.slots[player].blueprint
            found.append(SeedCredit(i, player, kind, contribution, shares.credit[player], shared, effect))
    return found
