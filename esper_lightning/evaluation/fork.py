"""Matched fork: the same host goes on with and without a seed, on the same data. The difference is the seed's doing.

A contribution (the seed switched off for one validation pass) says what the host has come to rely on; a fork says what
it would have been without.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from esper_lightning.envs import HostPool
from esper_lightning.evaluation.intervals import Interval, mean_interval


class Fork(NamedTuple):
    """Accuracy on the test split after the fork, in points of 100, [R] each: row r of both saw the same data."""

    with_seed: np.ndarray
    without_seed: np.ndarray

    @property
    def effect(self) -> Interval:
        """What the seed caused: mean difference over repetitions, paired."""
        return mean_interval(self.with_seed - self.without_seed)


def matched_fork(pool: HostPool, state: Mapping[str, Any], slot: str, ticks: int) -> Fork:
    """Continues one host for `ticks` host epochs, R times with the seed in `slot` and R times without it.

    Repetition r of both draws the same minibatches, and nothing is decided: seeds go their way by themselves.

    Args:
        pool: 2·R environments of the host's kind; whatever they are doing is lost.
        state: `HostEnv.state_dict` of the host as it is now.
        slot: Where the seed is. It may be live or fossilized.
        ticks: Host epochs m; 0: compared at once.
    """
    if pool.n_envs < 2 or pool.n_envs % 2:
        raise ValueError(f"a matched fork needs pairs of environments, the pool has {pool.n_envs}; give it 2·R")
    if ticks < 0:
        raise ValueError(f"a matched fork goes on for at least 0 host epochs, got {ticks}")
    for i in range(pool.n_envs):
        pool.load_host(i, state)
        env = pool.envs[i]
        env.generator.manual_seed(i // 2)
        if i % 2:
            env.growing.remove(slot)
    pool.carry_on(ticks)
    accuracy = 100.0 * pool.test(committed=False).double().numpy()
    return Fork(accuracy[::2], accuracy[1::2])
