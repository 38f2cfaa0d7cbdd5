"""Matched forks: two continuations of one host that differ in one seed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from esper_lightning.envs import HostPool
from esper_lightning.evaluation.credit import matched_fork
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.growth.counterfactual import leave_one_out
from tests.conftest import SMALL
from tests.decisions import WAIT, act, fossilize, germinate

STAYS_IN_TRAINING = replace(SMALL.lifecycle, training_ticks=99)
"""Settings that keep seeds in TRAINING."""


def grown_state(pool: HostPool, plan: Sequence[Sequence[int]], seed: int = 5) -> dict[str, Any]:
    """Return the state of the only host of a pool after the actions of `plan`."""
    pool.reset([seed])
    for decision in plan:
        pool.step(act(decision))
    return pool.envs[0].state_dict()


FOSSILIZE_FIRST = [germinate(0, 2), WAIT, WAIT, fossilize(0)]
"""Actions that fossilize a conv_light in the first slot."""


def test_a_seed_that_only_learns_causes_exactly_nothing(make_pool: Callable[..., HostPool]) -> None:
    state = grown_state(make_pool(1, lifecycle=STAYS_IN_TRAINING), [germinate(1, 2), WAIT])

    fork = matched_fork(make_pool(6, lifecycle=STAYS_IN_TRAINING), state, "block2.pool", ticks=3)

    assert np.array_equal(fork.with_seed, fork.without_seed)
    assert len(set(fork.with_seed)) > 1, "repetitions see different data"


def test_a_kept_seed_makes_a_difference(make_pool: Callable[..., HostPool]) -> None:
    state = grown_state(make_pool(1), FOSSILIZE_FIRST)

    fork = matched_fork(make_pool(8), state, "block1.pool", ticks=2)

    assert (fork.with_seed != fork.without_seed).any()
    assert fork.effect == mean_interval(fork.with_seed - fork.without_seed)


def test_without_time_to_recover_the_difference_is_the_contribution(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(1)
    state = grown_state(pool, FOSSILIZE_FIRST)
    whole, without, *_ = (100.0 * pool.variant_accuracies(0, leave_one_out(pool.space.slot), pool.data.test)).tolist()

    fork = matched_fork(make_pool(4), state, "block1.pool", ticks=0)

    assert fork.with_seed == pytest.approx(whole)
    assert fork.effect.mean == pytest.approx(whole - without)
    assert fork.effect.low == fork.effect.high, "there is nothing random in it"


def test_the_side_with_the_seed_is_the_host_that_goes_on(make_pool: Callable[..., HostPool]) -> None:
    state = grown_state(make_pool(1, horizon=9), FOSSILIZE_FIRST)
    pool = make_pool(1, horizon=9)
    env = pool.envs[0]
    env.load_state_dict(state)
    env.generator.manual_seed(1)
    pool.train_without_actions(0)
    for _ in range(3):
        pool.step(act(WAIT))

    fork = matched_fork(make_pool(4, horizon=9), state, "block1.pool", ticks=3)

    assert fork.with_seed[1] == pytest.approx(100.0 * pool.test_accuracy(fossilized_only=False).item())


def test_the_side_without_the_seed_knows_nothing_of_it(make_pool: Callable[..., HostPool]) -> None:
    state = grown_state(make_pool(1), FOSSILIZE_FIRST)
    pool = make_pool(2)

    matched_fork(pool, state, "block1.pool", ticks=1)

    with_seed, without = pool.envs
    assert with_seed.seed_parameters(frozenset(type(with_seed.slots[0].stage))) > 0
    assert not any(slot.occupied for slot in without.slots)
    assert len(without.optimizer.param_groups) == 1


def test_the_same_fork_twice_is_the_same(make_pool: Callable[..., HostPool]) -> None:
    state = grown_state(make_pool(1), FOSSILIZE_FIRST)
    pool = make_pool(4)

    first, again = (matched_fork(pool, state, "block1.pool", ticks=1) for _ in range(2))

    assert np.array_equal(first.with_seed, again.with_seed)
    assert np.array_equal(first.without_seed, again.without_seed)


def test_hosts_that_cannot_be_forked_are_refused_in_one_line(make_pool: Callable[..., HostPool]) -> None:
    state = grown_state(make_pool(1), FOSSILIZE_FIRST)

    with pytest.raises(ValueError, match="needs pairs of environments, the pool has 3"):
        matched_fork(make_pool(3), state, "block1.pool", ticks=1)
    with pytest.raises(ValueError, match="at least 0 host epochs, got -1"):
        matched_fork(make_pool(2), state, "block1.pool", ticks=-1)
    with pytest.raises(ValueError, match=r"unknown slot 'block1\.pol'; did you mean 'block1\.pool'"):
        matched_fork(make_pool(2), state, "block1.pol", ticks=1)
