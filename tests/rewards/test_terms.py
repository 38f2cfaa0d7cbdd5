"""Reward terms against hand-computed numbers, and properties that hold for all numbers."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_lightning.growth.stages import OCCUPIED, Stage
from esper_lightning.rewards import terms
from tests.rewards.ticks import points

gammas = st.floats(0.5, 1.0)


def test_potentials_rise_with_the_stage_and_with_the_ticks_in_it() -> None:
    fresh = {stage.name: terms.potential(stage, 0) for stage in Stage}
    assert fresh == {
        "DORMANT": 0.0, "GERMINATED": 1.0, "TRAINING": 2.0, "BLENDING": 3.5, "PROBATIONARY": 5.5, "FOSSILIZED": 6.0,
        "CULLED": 0.0, "EMBARGOED": 0.0,
    }  # fmt: skip
    assert [terms.potential(Stage.BLENDING, ticks) for ticks in (1, 6, 7, 100)] == pytest.approx([3.8, 5.3, 5.5, 5.5])


def test_an_empty_slot_has_no_potential_however_long_it_is_empty() -> None:
    assert {terms.potential(stage, 50) for stage in set(Stage) - OCCUPIED} == {0.0}


@given(st.lists(st.floats(0.0, 24.0), min_size=2, max_size=30), gammas)
def test_the_discounted_sum_of_shaping_telescopes(potentials: list[float], gamma: float) -> None:
    steps = enumerate(pairwise(potentials))
    total = sum(gamma**t * terms.shaping(before, after, gamma) for t, (before, after) in steps)
    assert total == pytest.approx(gamma ** (len(potentials) - 1) * potentials[-1] - potentials[0], abs=1e-9)


def test_attribution_by_hand() -> None:
    nothing_wrong = 1.0
    assert terms.attribution(-3.0, 8.0, nothing_wrong) == -3.0  # the seed does harm
    assert terms.attribution(5.0, -1.0, nothing_wrong) == 0.0  # the host depends on the seed, but has not gained
    assert terms.attribution(9.0, 4.0, nothing_wrong) == 6.0  # √(4·9)
    assert terms.attribution(4.0, 9.0, nothing_wrong) == 4.0  # at most the contribution
    assert terms.attribution(4.0, 9.0, -0.2) == pytest.approx(4.0 / (1.0 + math.exp(0.6)))
    assert terms.attribution(-4.0, 9.0, -0.2) == -4.0  # a negative contribution is not reduced


@given(points, points, st.floats(-100.0, 100.0))
def test_attribution_lies_between_zero_and_the_contribution(contribution: float, progress: float, clean: float) -> None:
    given_to_it = terms.attribution(contribution, progress, clean)
    assert min(contribution, 0.0) <= given_to_it <= max(contribution, 0.0) * (1.0 + 1e-6)


def test_a_seed_that_only_makes_itself_needed_holds_the_host_to_ransom() -> None:
    assert terms.is_ransom(0.2, -0.3)
    assert not terms.is_ransom(0.1, -0.3)
    assert not terms.is_ransom(5.0, -0.2)


def test_credit_moves_towards_what_is_due_by_two_points_a_tick() -> None:
    assert terms.credit_due(9.0, 4.0) == 6.0
    assert terms.credit_due(-9.0, 4.0) == terms.credit_due(9.0, -4.0) == terms.credit_due(-9.0, -4.0) == 0.0
    assert [terms.credit_after(credit, 6.0) for credit in (0.0, 5.5, 7.0, 10.0)] == [2.0, 6.0, 6.0, 8.0]


@pytest.mark.parametrize(("contribution", "bonus"), [(10.0, 2.0), (5.0, 1.0), (60.0, 2.0), (0.0, 0.0), (-5.0, -1.0)])
def test_the_bonus_for_a_fossil_follows_its_contribution(contribution: float, bonus: float) -> None:
    assert terms.fossilize_bonus(contribution, 2.0) == bonus


@given(st.floats(0.0, 10.0), st.integers(7, 200))
def test_the_drip_sums_to_seven_tenths_of_the_bonus(contribution: float, rest: int) -> None:
    # From 7 ticks on not even the whole bonus reaches the limit of 0.1 per tick.
    dripped = sum(terms.delayed_bonus_per_tick(contribution, 1.0, rest) for _ in range(rest))
    assert dripped == pytest.approx(0.7 * terms.fossilize_bonus(contribution, 1.0))


def test_the_drip_has_limits() -> None:
    assert terms.delayed_bonus_per_tick(10.0, 1.0, 1) == 0.1
    assert terms.delayed_bonus_per_tick(-10.0, 1.0, 1) == -0.05


def test_rent_is_logarithmic_and_capped() -> None:
    assert terms.log_rent(math.e - 1.0, 0.5, 1.0) == pytest.approx(0.5)
    assert terms.log_rent(0.0, 0.5, 1.0) == 0.0
    assert terms.log_rent(1e9, 0.5, 1.0) == 1.0


def test_warnings_grow_with_time() -> None:
    assert [terms.blending_warning(t) for t in (0, 2, 6, 50)] == pytest.approx([0.1, 0.2, 0.4, 0.4])
    assert [terms.waiting_warning(t) for t in (0, 1, 2, 4, 50)] == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3])
