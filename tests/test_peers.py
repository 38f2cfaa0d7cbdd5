"""benchmarks/peers.py in miniature; how good and how fast is said by the benchmark itself."""

import pytest

pytest.importorskip("gymnasium")

from benchmarks import peers


def test_what_is_learned_is_measured_on_the_cart_that_hides_its_velocities() -> None:
    pool = peers.cartpoles(3, 4)
    assert pool.observation.features.shape == (3, 2) and pool.space.sizes == {"action": 2}

    learned = peers.learn(seed=1, steps=2 * peers.HORIZON * peers.ENVS + 7)

    assert learned.steps == 2048, "whole rollouts, and no more steps than were allowed"
    assert 8.0 <= learned.greedy <= 500.0 and 8.0 <= learned.exploring <= 500.0


def test_the_cue_is_played_without_exploration_on_games_of_its_own() -> None:
    assert 0.0 <= peers.remembered("none", seed=0, rollouts=1) <= 0.5


def test_both_programs_are_timed_on_the_same_task() -> None:
    pytest.importorskip("sb3_contrib")

    assert peers.our_speed(1024, 0) > 0.0 and peers.their_speed(1024, 0) > 0.0
