"""The check by forking, in hosts of the laboratory."""

import pytest

from benchmarks.harm import Check, Checked
from benchmarks.zero_shot import SETTINGS, make_pool
from esper_lightning import load_controller
from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.rules import Periodic, PeriodicConfig, WaitOnly
from esper_lightning.envs import EnvConfig, HostPool
from esper_lightning.envs.vector_env import EVALUATION, episode_rng_seeds
from esper_lightning.evaluation.play import Outcome, play_episode

ALL, NONE = -1e9, 1e9
"""Standard errors with which every seed passes the check, and none."""


@pytest.fixture(scope="module")
def pool() -> HostPool:
    policy = load_controller("tamiyo")
    assert policy.rules is not None and policy.observation is not None
    env = EnvConfig(observation=policy.observation, lifecycle=policy.rules.lifecycle, actions=policy.rules.actions)
    return make_pool(SETTINGS["another table"]._replace(hosts=3), env, None, None)


def play(pool: HostPool, controller: Controller) -> Outcome:
    return play_episode(pool, "", controller, rng_seeds=episode_rng_seeds(1, EVALUATION, 0, n_envs=pool.n_envs))


def rule() -> Controller:
    return Periodic(PeriodicConfig(every=1))


def assert_same(first: Outcome, second: Outcome) -> None:
    assert first.objective.tolist() == second.objective.tolist() and first.loss.tolist() == second.loss.tolist()


def test_where_no_seed_passes_the_host_is_as_if_it_had_never_grown(pool: HostPool) -> None:
    checked = Checked(rule(), Check(errors=NONE, undo=True))
    assert_same(play(pool, checked), play(pool, WaitOnly()))
    assert (checked.dropped == checked.checks).all() and (checked.dropped > 1).all()


def test_where_every_seed_passes_the_host_is_that_of_the_controller_alone(pool: HostPool) -> None:
    checked = Checked(rule(), Check("loss", errors=ALL))
    alone, with_check = play(pool, rule()), play(pool, checked)
    assert_same(with_check, alone)
    assert (checked.checks == alone.fossils).all() and not checked.dropped.any() and (alone.fossils > 1).all()


@pytest.mark.parametrize("race", [0.0, 0.5])
def test_a_race_that_growth_loses_ends_as_waiting_does(pool: HostPool, race: float) -> None:
    checked = Checked(rule(), Check("loss", errors=NONE, race=race))
    waiting = play(pool, WaitOnly())
    assert_same(play(pool, checked), waiting)
    assert checked.flops.tolist() == (waiting.flops * race).round().astype(int).tolist()
    assert checked.checks.tolist() == [1] * pool.n_envs
