"""Credit of each fossilized seed by three measures: ablation, Shapley value and matched continuation without it.

A matched continuation (fork) trains copies of one host on the same minibatches, half of them with the seed and half
without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from esper_lightning.envs import HostPool
from esper_lightning.evaluation.statistics import Interval, mean_interval
from esper_lightning.growth.counterfactual import SeedVariant, leave_one_out
from esper_lightning.growth.shapley import Credit, allocate_credit


class Fork(NamedTuple):
    """Accuracy on the test split after the fork, in points of 100, [R] each. Row r of both arrays saw the same data."""

    with_seed: np.ndarray
    without_seed: np.ndarray

    @property
    def effect(self) -> Interval:
        """Mean accuracy difference caused by the seed, paired over repetitions, with its interval."""
        return mean_interval(self.with_seed - self.without_seed)


def matched_fork(pool: HostPool, state: Mapping[str, Any], slot: str, *, ticks: int) -> Fork:
    """Continue one host for `ticks` host epochs, R times with the seed in `slot` and R times without it.

    Repetition r of both draws the same minibatches. No actions are taken: seeds advance automatically only.

    Args:
        pool: Pool with 2 * R environments of the host's kind; its state is overwritten.
        state: `HostEnv.state_dict` of the host.
        slot: Slot of the seed, which may be live or fossilized.
        ticks: Host epochs of the continuation. 0: compare immediately.
    """
    if pool.n_envs < 2 or pool.n_envs % 2:
        raise ValueError(f"a matched fork needs pairs of environments, the pool has {pool.n_envs}; give it 2·R")
    if ticks < 0:
        raise ValueError(f"a matched fork needs at least 0 host epochs, got {ticks}")
    for i in range(pool.n_envs):
        pool.load_host(i, state)
        env = pool.envs[i]
        env.generator.manual_seed(i // 2)
        if i % 2:
            env.growing.remove_seed(slot)
    pool.train_without_actions(ticks)
    accuracy = 100.0 * pool.test_accuracy(fossilized_only=False).double().numpy()
    return Fork(accuracy[::2], accuracy[1::2])


MAX_REPETITIONS = 1000
"""Largest number of continuations of a host, which are played side by side, and of pairs of orders."""


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
        if max(self.repetitions, self.pairs) > MAX_REPETITIONS:
            raise ValueError(
                f"credit: repetitions and pairs must be at most {MAX_REPETITIONS}, got {self.repetitions} and "
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


def measure_credit(pool: HostPool, fork_pool: HostPool, config: CreditConfig) -> list[SeedCredit]:
    """Measure the credit of the fossilized seeds of the pool's first hosts.

    Seeds that are not fossilized are removed, as always at the end of an episode.

    Args:
        pool: Hosts whose episode has ended.
        fork_pool: Pool of the same kind with 2 * repetitions environments; its state is overwritten.
        config: Number of hosts and precision.
    """
    seed_credits = []
    for i, env in enumerate(pool.envs[: config.hosts]):
        for slot in env.slots:
            if slot.live:
                env.growing.remove_seed(slot.name)
        players = [slot.name for slot in env.slots if slot.occupied]
        if not players:
            continue

        def coalition_values(variants: list[SeedVariant], host: int = i) -> list[float]:
            return (100.0 * pool.variant_accuracies(host, variants, pool.data.test)).tolist()

        shares = allocate_credit(coalition_values, players, config.pairs, rng=np.random.default_rng(i))
        ablations = leave_one_out(players)
        values = shares.coalition_values or dict(zip(ablations, coalition_values(ablations), strict=True))
        all_seeds = frozenset(players)
        state = env.state_dict()
        for player in players:
            contribution = values[all_seeds] - values[all_seeds - {player}]
            effect = matched_fork(fork_pool, state, player, ticks=config.fork_ticks).effect
            interaction = shares.interaction_of(player)
            blueprint = env.growing.slots[player].blueprint
            assert blueprint is not None, "that of a fossilized seed"
            seed_credits.append(
                SeedCredit(i, player, blueprint, contribution, shares.credit[player], interaction, effect)
            )
    return seed_credits
