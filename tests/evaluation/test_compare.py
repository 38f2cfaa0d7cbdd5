from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_lightning.envs import Action, HostPool, Op
from esper_lightning.envs.training import HostTraining
from esper_lightning.evaluation.compare import Interval, Outcome, mean_interval, paired_difference, play
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import ObjectiveConfig
from esper_lightning.tamiyo.baselines import RandomValid, WaitOnly
from tests.decisions import WAIT, act, fossilize, germinate


@pytest.mark.parametrize(
    ("values", "half_width"),
    [
        # Student's t for 95 % from the printed table, times deviation over the root of n.
        ([1.0, 3.0], 12.706 * 2**0.5 / 2**0.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 2.776 * 2.5**0.5 / 5**0.5),
        ([0.0] * 8 + [1.0] * 8, 2.131 * (4 / 15) ** 0.5 / 4),
    ],
)
def test_an_interval_is_that_of_the_table(values: list[float], half_width: float) -> None:
    mean, low, high = mean_interval(np.array(values))

    assert mean == pytest.approx(np.mean(values))
    assert high - mean == pytest.approx(half_width, rel=1e-3)
    assert mean - low == pytest.approx(half_width, rel=1e-3)


@pytest.mark.parametrize("hosts", [3, 10, 40])
def test_an_interval_holds_the_truth_as_often_as_it_promises(hosts: int) -> None:
    samples = 2.0 + 3.0 * np.random.default_rng(hosts).normal(size=(500, hosts))

    hits = [low <= 2.0 <= high for _, low, high in map(mean_interval, samples)]

    assert np.mean(hits) == pytest.approx(0.95, abs=0.03)


@pytest.mark.parametrize("values", [[0.5], [0.25, 0.25, 0.25]])
def test_without_spread_the_interval_is_the_mean(values: list[float]) -> None:
    assert mean_interval(np.array(values)) == Interval(values[0], values[0], values[0])


def outcome(name: str, objective: np.ndarray) -> Outcome:
    return Outcome(name, np.zeros_like(objective), np.zeros_like(objective), objective)


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
    return make_pool(2, training=HostTraining(batches=6), objective=ObjectiveConfig(price=0.5))


class OnlyGerminates:
    """Fills all slots, or the first `keep` of them for good."""

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
def test_only_committed_seeds_are_judged_and_paid_for(pool: HostPool, keep: int, parameters: int) -> None:
    played = play(pool, "grower", OnlyGerminates(keep), [1, 3])

    inputs, targets = pool.data.test
    for i, env in enumerate(pool.envs):
        assert sum(slot.stage is Stage.FOSSILIZED for slot in env.slots) == keep
        network = deepcopy(env.network).eval()
        for slot in slots_of(network).values():
            if slot.stage is not Stage.FOSSILIZED:
                slot.empty()
        right = (network(inputs).argmax(1) == targets).float().mean().item()
        assert played.accuracy[i] == pytest.approx(right)
    assert played.controller == "grower"
    assert played.parameters.tolist() == [parameters] * 2
    rent = 0.5 * np.log(1 + (parameters - 390) / 390)
    np.testing.assert_allclose(played.objective, played.accuracy - rent, atol=1e-6)


def test_a_game_is_reproducible_whatever_was_played_before(pool: HostPool) -> None:
    first = play(pool, "random", RandomValid(0), [1, 3])
    play(pool, "wait", WaitOnly(), [7, 9])
    again = play(pool, "random", RandomValid(0), [1, 3])
    other = play(pool, "random", RandomValid(0), [7, 9])

    for ours, theirs in zip(first[1:], again[1:], strict=True):
        assert np.array_equal(ours, theirs)
    assert not np.array_equal(first.accuracy, other.accuracy)


def test_controllers_meet_the_same_hosts(pool: HostPool) -> None:
    one, other = (play(pool, name, WaitOnly(), [1, 3]) for name in ("one", "other"))

    assert paired_difference(one, other) == Interval(0.0, 0.0, 0.0)
    assert one.accuracy[0] != one.accuracy[1], "and no two hosts are alike"
