from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from esper_lightning.controllers.random import RandomValid, WaitOnly
from esper_lightning.envs import Action, HostPool, Op
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.evaluation.play import Outcome, PoolTrace, paired_difference, play_episode
from esper_lightning.evaluation.statistics import Interval
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import ObjectiveConfig
from tests.decisions import WAIT, act, fossilize, germinate


def outcome(name: str, objective: np.ndarray) -> Outcome:
    none = np.zeros_like(objective)
    trace = PoolTrace(none[None], none[None], none[None, :, None])
    kept, members = [()] * len(none), ["as configured"] * len(none)
    return Outcome(name, none, none, none, objective, none, none, none, none, 0.0, kept, trace, members, {})


@given(seed=st.integers(0, 1000), gain=st.floats(-1.0, 1.0))
def test_what_hosts_have_in_common_cancels_in_a_paired_difference(seed: int, gain: float) -> None:
    random = np.random.default_rng(seed)
    host, noise = 10.0 * random.normal(size=20), 0.01 * random.normal(size=20)

    mean, low, high = paired_difference(outcome("ours", host + gain + noise), outcome("other", host))

    assert low <= mean <= high < low + 0.05, "as narrow as the noise, although hosts differ by ten"
    assert mean == pytest.approx(gain, abs=0.02)
    swapped = paired_difference(outcome("other", host), outcome("ours", host + gain + noise))
    assert swapped == pytest.approx((-mean, -high, -low))


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., HostPool]) -> HostPool:
    return make_pool(2, training=HostTraining(lr=0.02, batches=6), objective=ObjectiveConfig(price=0.5))


class OnlyGerminates:
    """Germinates in all slots, and fossilizes the seeds of the first `keep` slots."""

    def __init__(self, keep: int) -> None:
        self.keep = keep

    def reset(self, pool: HostPool) -> None:
        pass

    def act(self, pool: HostPool) -> Action:
        possible = pool.masks.slot[0].tolist()
        row = WAIT
        for slot in range(3):
            if possible[Op.GERMINATE][slot]:
                row = germinate(slot, 1)
                break
            if slot < self.keep and possible[Op.FOSSILIZE][slot]:
                row = fossilize(slot)
        return act(*[row] * pool.n_envs)


@pytest.mark.parametrize(("keep", "parameters"), [(0, 390), (1, 390 + 20), (2, 390 + 20 + 72)])
def test_only_fossilized_seeds_are_validated_and_rewarded(pool: HostPool, keep: int, parameters: int) -> None:
    played = play_episode(pool, "grower", OnlyGerminates(keep), rng_seeds=[1, 3])

    inputs, targets = pool.data.test
    for i, env in enumerate(pool.envs):
        assert sum(slot.stage is Stage.FOSSILIZED for slot in env.slots) == keep
        network = deepcopy(env.network).eval()
        for slot in slots_of(network).values():
            if slot.stage is not Stage.FOSSILIZED:
                slot.empty()
        right = (network(inputs).argmax(1) == targets).float().mean().item()
        assert played.accuracy[i] == pytest.approx(right)
        assert played.loss[i] == pytest.approx(F.cross_entropy(network(inputs), targets).item(), rel=1e-4)
    assert played.controller == "grower"
    assert played.parameters.tolist() == [parameters] * 2
    rent = 0.5 * np.log(1 + (parameters - 390) / 390)
    np.testing.assert_allclose(played.objective, played.accuracy - rent, atol=1e-6)


def test_a_game_is_reproducible_whatever_was_played_before(pool: HostPool) -> None:
    first = play_episode(pool, "random", RandomValid(0), rng_seeds=[1, 3])
    play_episode(pool, "wait", WaitOnly(), rng_seeds=[7, 9])
    again = play_episode(pool, "random", RandomValid(0), rng_seeds=[1, 3])
    other = play_episode(pool, "random", RandomValid(0), rng_seeds=[7, 9])

    for column in ("accuracy", "loss", "parameters", "objective", "flops", "ticks", "fossils", "rollbacks"):
        assert np.array_equal(getattr(first, column), getattr(again, column)), column
    for ours, theirs in zip(first.trace, again.trace, strict=True):
        assert np.array_equal(ours, theirs)
    assert first.topologies == again.topologies
    assert not np.array_equal(first.accuracy, other.accuracy)


def test_controllers_meet_the_same_hosts(pool: HostPool) -> None:
    one, other = (play_episode(pool, name, WaitOnly(), rng_seeds=[1, 3]) for name in ("one", "other"))

    assert paired_difference(one, other) == Interval(0.0, 0.0, 0.0)
    assert one.accuracy[0] != one.accuracy[1], "and no two hosts are alike"


def test_a_trace_says_what_was_done_and_what_came_of_it(pool: HostPool) -> None:
    trace = play_episode(pool, "grower", OnlyGerminates(1), rng_seeds=[1, 3]).trace

    assert trace.ops[:3, 0].tolist() == [Op.GERMINATE] * 3
    assert (trace.ops[:, 0] == Op.FOSSILIZE).sum() == 1
    kept = (trace.ops[:, 0] == Op.FOSSILIZE).argmax()
    assert (trace.stages[kept:, :, 0] == Stage.FOSSILIZED).all()
    assert not (trace.stages[:kept, :, 0] == Stage.FOSSILIZED).any()
    for i, env in enumerate(pool.envs):
        assert trace.accuracy[:-1, i] == pytest.approx(env.history.accuracy[1:-1])
        assert trace.accuracy[-1, i] == pytest.approx(env.validated.fossilized.accuracy), "of fossilized seeds alone"


def test_rollbacks_are_counted_host_by_host(pool: HostPool) -> None:
    class Poisons(WaitOnly):
        """Sets the second host's weights to NaN before its third tick."""

        def act(self, pool: HostPool) -> Action:
            if pool.envs[1].tick == 2:
                with torch.no_grad():
                    next(pool.envs[1].network.parameters()).fill_(float("nan"))
            return super().act(pool)

    assert play_episode(pool, "poisons", Poisons(), rng_seeds=[1, 3]).rollbacks.tolist() == [0, 1]
