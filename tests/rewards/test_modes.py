"""Reward modes: properties that hold for every mode in any step, and the terms of each mode by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_lightning.envs.rewards import REWARDS, HostStep, RewardConfig, SlotStatus, compute_terms
from esper_lightning.envs.rewards.modes import attribution, potential
from esper_lightning.growth.stages import OCCUPIED, Stage
from tests.rewards.ticks import ALL, EMPTY, arbitrary_ticks, host_step, seed_life, slot_step, term_bounds

KEPT = SlotStatus(Stage.FOSSILIZED, 0, 4)
ON_PROBATION = SlotStatus(Stage.PROBATIONARY, 3, 4)
BLENDING = SlotStatus(Stage.BLENDING, 2, 3)
CULLED = SlotStatus(Stage.CULLED, 0, 0)

SHAPED = RewardConfig(mode="shaped")


@pytest.mark.parametrize("mode", ALL)
@given(one=arbitrary_ticks)
def test_every_term_is_within_its_bound(mode: str, one: HostStep) -> None:
    config = RewardConfig(mode=mode)
    paid, bounds = compute_terms(one, config), term_bounds(config, len(one.slots))
    assert list(paid) == list(bounds)
    for name, bound in bounds.items():
        assert abs(paid[name]) <= bound + 1e-9, name


@pytest.mark.parametrize("mode", ALL)
@given(
    advances=st.lists(st.booleans(), min_size=1, max_size=12),
    waits=st.integers(0, 3),
    gamma=st.floats(0.5, 1.0),
    last=st.booleans(),
)
def test_a_seed_that_comes_and_goes_and_changes_nothing_earns_nothing(
    mode: str, advances: list[bool], waits: int, gamma: float, last: bool
) -> None:
    """Compare with waiting for as many ticks, in the discounted sum; also where the episode ends with the cull."""
    config = RewardConfig(mode=mode, gamma=gamma)
    cycle = [("WAIT", slot_step(EMPTY))] * waits + seed_life(advances)
    there = [host_step(slot, op=op, at_horizon=last and i == len(cycle) - 1) for i, (op, slot) in enumerate(cycle)]
    idle = [host_step(slot_step(EMPTY), at_horizon=one.at_horizon) for one in there]
    value, nothing = (
        sum(gamma**t * sum(compute_terms(one, config).values()) for t, one in enumerate(steps))
        for steps in (there, idle)
    )
    assert value <= nothing + 1e-9


@pytest.mark.parametrize("mode", ALL)
def test_after_a_rollback_what_was_lent_is_taken_back_and_nothing_else_counts(mode: str) -> None:
    lent = slot_step(BLENDING, score_at_germination=0.1, contribution=60.0, contribution_before=50.0)
    step = host_step(lent, diverged=True, score=0.9, objective=0.9, at_horizon=True)
    expected = {"shaping": pytest.approx(-0.3 * 4.1)}
    assert compute_terms(step, RewardConfig(mode=mode)) == {n: expected.get(n, 0.0) for n in REWARDS[mode].terms}


def test_sparse_gives_the_objective_at_the_end_of_the_episode() -> None:
    sparse = RewardConfig(mode="sparse")
    assert compute_terms(host_step(objective=0.7), sparse) == {"end": 0.0}
    assert compute_terms(host_step(objective=0.7, at_horizon=True), sparse) == {"end": 0.7}


def test_shaping_of_a_whole_episode_is_nothing_unless_it_goes_on_beyond_the_horizon() -> None:
    first = slot_step(EMPTY, SlotStatus(Stage.GERMINATED, 0, 0), ON_PROBATION)
    last = host_step(slot_step(ON_PROBATION, KEPT, KEPT._replace(ticks_in_stage=1)), at_horizon=True)
    assert compute_terms(host_step(first), SHAPED)["shaping"] == pytest.approx(0.3 * 6.4)
    assert compute_terms(last, SHAPED)["shaping"] == pytest.approx(-0.3 * 6.4)
    assert compute_terms(last, replace(SHAPED, horizon_is_end=False))["shaping"] == pytest.approx(0.3 * (6.3 - 6.4))


def test_potentials_rise_with_the_stage_and_with_the_ticks_in_it() -> None:
    fresh = {stage: potential(SlotStatus(stage, 0, 0)) for stage in Stage}
    assert list(fresh.values()) == [0.0, 1.0, 2.0, 3.5, 5.5, 6.0, 0.0, 0.0]
    waiting = [potential(SlotStatus(Stage.BLENDING, ticks, ticks)) for ticks in (1, 6, 7, 100)]
    assert waiting == pytest.approx([3.8, 5.3, 5.5, 5.5])
    assert {potential(SlotStatus(stage, 50, 50)) for stage in set(Stage) - OCCUPIED} == {0.0}, "no seed"


@pytest.mark.parametrize(
    ("contribution", "progress", "gain", "expected"),
    [
        (-3.0, 8.0, 1.0, -3.0),  # the seed does harm
        (5.0, -1.0, 1.0, 0.0),  # the host depends on the seed, but has not gained
        (9.0, 4.0, 1.0, 6.0),  # √(4·9)
        (4.0, 9.0, 1.0, 4.0),  # at most the contribution
        (4.0, 9.0, -0.2, 4.0 / (1.0 + math.exp(0.6))),
        (-4.0, 9.0, -0.2, -4.0),  # a negative contribution is not reduced
    ],
)
def test_attribution_by_hand(contribution: float, progress: float, gain: float, expected: float) -> None:
    assert attribution(contribution, progress, gain) == pytest.approx(expected)


def test_shaped_rewards_contributions_and_subtracts_the_previous_one() -> None:
    there = slot_step(BLENDING, score_at_germination=0.3, contribution=30.0, growth=0.5)
    paid = compute_terms(host_step(there, score=0.5, host_only_score=0.4), SHAPED)
    assert paid["attribution"] == pytest.approx((20.0 * 30.0) ** 0.5)
    assert paid["rent"] == pytest.approx(-0.5 * 0.4054651)
    gone = slot_step(BLENDING, CULLED, score_at_germination=0.3, contribution_before=30.0)
    paid = compute_terms(host_step(gone, score=0.2, score_before=0.5, host_only_score_before=0.4, op="CULL"), SHAPED)
    assert (paid["attribution"], paid["op"]) == (pytest.approx(-((20.0 * 30.0) ** 0.5)), -0.005)
    left = slot_step(ON_PROBATION, ON_PROBATION, CULLED, score_at_germination=0.3, contribution=-2.0)
    paid = compute_terms(host_step(left, score=0.5, host_only_score=0.5), SHAPED)
    assert (paid["attribution"], paid["auto_cull"]) == (-2.0, -0.2)
    assert compute_terms(host_step(slot_step(BLENDING, growth=1e9)), SHAPED)["rent"] == -1.0, "its cap"


@pytest.mark.parametrize(("ticks", "cost"), [(0, 0.1), (2, 0.2), (6, 0.4), (50, 0.4)])
def test_blending_a_seed_that_makes_the_host_worse_costs_more_with_time(ticks: int, cost: float) -> None:
    worse = slot_step(BLENDING._replace(ticks_in_stage=ticks), score_at_germination=0.9)
    assert compute_terms(host_step(worse), SHAPED)["warnings"] == pytest.approx(-cost)


@pytest.mark.parametrize(("ticks", "cost"), [(0, 0.0), (1, 0.0), (2, 0.1), (4, 0.2), (50, 0.3)])
def test_waiting_with_a_good_seed_costs_more_with_time(ticks: int, cost: float) -> None:
    late = slot_step(ON_PROBATION._replace(ticks_in_stage=ticks), contribution_before=2.0)
    assert compute_terms(host_step(late), SHAPED)["warnings"] == pytest.approx(-cost)
    assert compute_terms(host_step(late, op="GERMINATE"), SHAPED)["warnings"] == 0.0


@pytest.mark.parametrize(("bare", "cost"), [(0.6, 0.3), (0.4, 0.0)])
def test_a_seed_that_only_makes_itself_needed_holds_the_host_to_ransom(bare: float, cost: float) -> None:
    needed = slot_step(BLENDING, score_at_germination=0.5, contribution=3.0)
    assert compute_terms(host_step(needed, host_only_score=bare), SHAPED)["ransom"] == -cost
