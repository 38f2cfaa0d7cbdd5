"""Matched fork: one host continues with and without a seed on the same data; the difference is the seed's effect.

A contribution (the seed switched off for one validation pass) measures how much the host has come to rely on the seed.
A fork measures how the host would have developed without it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from esper_lightning.envs import HostPool
from esper_lightning.evaluation.intervals import Interval, mean_interval


class Fork(NamedTuple):
    """Accuracy on the test split after the fork, in points of 100, [R] each. Row r of both arrays saw the same data."""

    with_seed: np.ndarray
    without_seed: np.ndarray

    @property
    def effect(self) -> Interval:
        """Mean accuracy difference caused by the seed, paired over repetitions, with its interval."""
        return mean_interval(self.with_seed - self.without_seed)


def matched_fork(pool: HostPool, state: Mapping[str, Any], slot: str, ticks: int) -> Fork:
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
            env.growing.remove(slot)
    pool.carry_on(ticks)
    accuracy = 100.0 * pool.test(committed=False).double().numpy()
    return Fork(accuracy[::2], accuracy[1::2])
