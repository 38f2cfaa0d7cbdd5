"""What each seed that was kept is worth, in three ways: switched off, shared out fairly, and never grown."""

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
    """How closely kept seeds are looked at."""

    hosts: int = 0
    """Evaluated hosts whose seeds are looked at, the first ones. 0: none."""

    fork_ticks: int = 3
    """Host epochs for which a host goes on with and without a seed."""

    repetitions: int = 4
    """Matched pairs of such continuations per seed."""

    pairs: int = 16
    """Pairs of random orders for Shapley values of hosts that kept more than four seeds."""

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
    """Of one fossil, all in accuracy points (of 100) on the test split."""

    host: int
    slot: str
    blueprint: str
    contribution: float
    """The host's accuracy minus that with this seed switched off."""
    shapley: Credit
    """Its share of what all seeds together add."""
    interaction: float | None
    """Sum of its interactions with the other kept seeds: below 0 where they do each other's work. None: too many seeds
    to know."""
    effect: Interval
    """What it caused: the host that went on with it minus the one that went on without."""


def credit_seeds(pool: HostPool, pairs_pool: HostPool, config: CreditConfig) -> list[SeedCredit]:
    """Looks at the fossils of the pool's first hosts; what they have not fossilized is dropped, as always at the end.

    Args:
        pool: Hosts whose episode is over.
        pairs_pool: Another pool of the same kind with 2·repetitions environments: it is used up.
        config: See CreditConfig.
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
