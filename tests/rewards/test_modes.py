"""Reward modes: properties that hold for every mode in any step, and the terms of each mode."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import (
    MODES,
    HostStep,
    ModeName,
    RewardConfig,
    SeedAccount,
    SlotStatus,
    SlotStep,
    account_after,
    compute_terms,
)
from tests.rewards.ticks import (
    EMPTY,
    arbitrary_ticks,
    host_step,
    points,
    reward_bound,
    seed_life,
    shares,
    slot_step,
    term_bounds,
)

ALL = get_args(ModeName)

KEPT = SlotStatus(Stage.FOSSILIZED, 0, 4)
ON_PROBATION = SlotStatus(Stage.PROBATIONARY, 3, 4)
BLENDING = SlotStatus(Stage.BLENDING, 2, 3)
CULLED = SlotStatus(Stage.CULLED, 0, 0)


def reward(step: HostStep, mode: ModeName, **settings: float) -> float:
    return sum(compute_terms(step, RewardConfig(mode=mode, **settings)).values())


@pytest.mark.parametrize("mode", ALL)
@given(one=arbitrary_ticks)
def test_every_term_and_every_reward_is_within_its_bound(mode: ModeName, one: HostStep) -> None:
    config, slots = RewardConfig(mode=mode), len(one.slots)
    paid, bounds = compute_terms(one, config), term_bounds(config, slots)
    assert list(paid) == list(bounds)
    for name, bound in bounds.items():
        assert abs(paid[name]) <= bound + 1e-9, name
    assert abs(sum(paid.values())) <= reward_bound(config, slots) + 1e-9


@pytest.mark.parametrize("mode", ALL)
@given(
    advances=st.lists(st.booleans(), min_size=1, max_size=12),
    waits=st.integers(0, 3),
    gamma=st.floats(0.5, 1.0),
    last=st.booleans(),
)
def test_a_seed_that_comes_and_goes_and_changes_nothing_earns_nothing(
    mode: ModeName, advances: list[bool], waits: int, gamma: float, last: bool
) -> None:
    """Compare with waiting for as many ticks, in the discounted sum; also where the episode ends with the cull."""
    config = RewardConfig(mode=mode, gamma=gamma)
    cycle = [("WAIT", slot_step(EMPTY))] * waits + seed_life(advances)
    there = [host_step(slot, op=op, at_horizon=last and i == len(cycle) - 1) for i, (op, slot) in enumerate(cycle)]
    idle = [host_step(slot_step(EMPTY), at_horizon=one.at_horizon) for one in there]
    value, nothing = (
        sum(gamma**t * sum(compute_terms(one, config).values()) for t, one in enumerate(t)) for t in (there, idle)
    )
    assert value <= nothing + 1e-9


@pytest.mark.parametrize("mode", ["shaped", "escrow"])
@given(
    measured=st.lists(st.floats(-100.0, 0.0), min_size=1, max_size=8),
    accuracies=st.lists(shares, min_size=9, max_size=9),
)
def test_a_seed_that_does_harm_earns_nothing_by_being_culled(
    mode: ModeName, measured: list[float], accuracies: list[float]
) -> None:
    """A cull pays back at most what was charged before."""
    account = SeedAccount(accuracy_at_germination=accuracies[0])
    total, last = 0.0, 0.0
    for contribution, accuracy in zip(measured, accuracies[1:], strict=False):
        slot = slot_step(BLENDING, account=account, contribution=contribution, contribution_before=last)
        account = account_after(slot, host_step(slot, accuracy=accuracy, host_only_accuracy=accuracy))
        paid = compute_terms(host_step(slot, accuracy=accuracy, host_only_accuracy=accuracy), RewardConfig(mode=mode))
        total, last = total + paid.get("attribution", 0.0) + paid.get("credit", 0.0), contribution
    slot = slot_step(BLENDING, CULLED, account=account, contribution_before=last)
    paid = compute_terms(host_step(slot, op="CULL"), RewardConfig(mode=mode))
    assert total + paid.get("attribution", 0.0) + paid.get("credit", 0.0) <= 1e-9


@pytest.mark.parametrize("mode", ["shaped", "basic", "basic_plus"])
def test_shaping_of_a_whole_episode_is_nothing_unless_it_goes_on_beyond_the_horizon(mode: ModeName) -> None:
    first = slot_step(EMPTY, SlotStatus(Stage.GERMINATED, 0, 0), ON_PROBATION)
    last = slot_step(ON_PROBATION, KEPT, KEPT._replace(ticks_in_stage=1))
    config = RewardConfig(mode=mode)
    assert compute_terms(host_step(first), config)["shaping"] == pytest.approx(0.3 * 6.4)
    assert compute_terms(host_step(last, at_horizon=True), config)["shaping"] == pytest.approx(-0.3 * 6.4)
    beyond = replace(config, horizon_is_end=False)
    assert compute_terms(host_step(last, at_horizon=True), beyond)["shaping"] == pytest.approx(0.3 * (6.3 - 6.4))


@pytest.mark.parametrize("mode", ALL)
def test_after_a_rollback_what_was_lent_is_taken_back_and_nothing_else_counts(mode: ModeName) -> None:
    lent = slot_step(
        BLENDING,
        account=SeedAccount(accuracy_at_germination=0.1, credit=4.0),
        contribution=60.0,
        contribution_before=50.0,
    )
    paid = compute_terms(
        host_step(lent, diverged=True, accuracy=0.9, objective=0.9, at_horizon=True), RewardConfig(mode=mode)
    )
    expected = {"shaping": pytest.approx(-0.3 * 4.1), "credit": -4.0}
    assert paid == {name: expected.get(name, 0.0) for name in MODES[mode]}


def test_sparse_gives_the_objective_at_the_end_of_the_episode() -> None:
    assert reward(host_step(objective=0.7), "sparse") == 0.0
    assert reward(host_step(objective=0.7, at_horizon=True), "sparse") == 0.7


def test_shaped_rewards_contributions_and_subtracts_the_previous_one() -> None:
    account = SeedAccount(accuracy_at_germination=0.3)
    there = slot_step(BLENDING, account=account, contribution=30.0, growth=0.5)
    paid = compute_terms(host_step(there, accuracy=0.5, host_only_accuracy=0.4), RewardConfig(mode="shaped"))
    assert paid["attribution"] == pytest.approx((20.0 * 30.0) ** 0.5)
    assert paid["rent"] == pytest.approx(-0.5 * 0.4054651)
    gone = slot_step(BLENDING, CULLED, account=account, contribution_before=30.0)
    paid = compute_terms(
        host_step(gone, accuracy=0.2, accuracy_before=0.5, host_only_accuracy_before=0.4, op="CULL"),
        RewardConfig(mode="shaped"),
    )
    assert paid["attribution"] == pytest.approx(-((20.0 * 30.0) ** 0.5))
    assert paid["op"] == -0.005
    left = slot_step(ON_PROBATION, ON_PROBATION, CULLED, account=account, contribution=-2.0)
    paid = compute_terms(host_step(left, accuracy=0.5, host_only_accuracy=0.5), RewardConfig(mode="shaped"))
    assert (paid["attribution"], paid["auto_cull"]) == (-2.0, -0.2)


def test_shaped_warns() -> None:
    worse = slot_step(BLENDING, account=SeedAccount(accuracy_at_germination=0.9))
    late = slot_step(ON_PROBATION, contribution_before=2.0)
    needed = slot_step(BLENDING, account=SeedAccount(accuracy_at_germination=0.5), contribution=3.0)
    config = RewardConfig(mode="shaped")
    assert compute_terms(host_step(worse), config)["warnings"] == pytest.approx(-0.2)
    assert compute_terms(host_step(late), config)["warnings"] == pytest.approx(-0.15)
    assert compute_terms(host_step(late, op="GERMINATE"), config)["warnings"] == 0.0
    assert compute_terms(host_step(needed, host_only_accuracy=0.6), config)["ransom"] == -0.3
    assert compute_terms(host_step(needed, host_only_accuracy=0.4), config)["ransom"] == 0.0


def test_basic_gives_the_bonus_at_once_and_basic_plus_spread_over_ticks() -> None:
    kept = slot_step(ON_PROBATION, KEPT, contribution=5.0, account=SeedAccount(ticks_left=10), growth=2.0, alpha=0.5)
    assert compute_terms(host_step(kept), RewardConfig(mode="basic"))["bonus"] == 0.5
    assert compute_terms(host_step(kept), RewardConfig(mode="basic"))["rent"] == pytest.approx(-0.1)
    assert compute_terms(host_step(kept), RewardConfig(mode="basic", budget=2.0))["rent"] == pytest.approx(-0.05)
    rest = [compute_terms(host_step(kept), plus := RewardConfig(mode="basic_plus"))]
    rest += [
        compute_terms(host_step(slot_step(KEPT, contribution=5.0, account=SeedAccount(ticks_left=10))), plus)
        for _ in range(9)
    ]
    assert sum(paid["bonus"] for paid in rest) == pytest.approx(0.15)
    assert sum(paid["drip"] for paid in rest) == pytest.approx(0.35)


def test_basic_rewards_the_gain_of_the_host_with_its_fossilized_seeds() -> None:
    one = host_step(at_horizon=True, accuracy=0.9, fossilized_accuracy=0.7, accuracy_at_start=0.1)
    assert compute_terms(one, RewardConfig(mode="basic"))["end"] == pytest.approx(3.0)


def escrow_total(slots: list[SlotStep], accuracies: list[float], last: bool = False) -> tuple[float, SeedAccount]:
    """Return the sum of all that is paid for one seed, and its account."""
    total, account = 0.0, slots[0].account
    for i, (slot, accuracy) in enumerate(zip(slots, accuracies, strict=True)):
        slot = slot._replace(account=account)
        one = host_step(slot, accuracy=accuracy, at_horizon=last and i == len(slots) - 1)
        total += reward(one, "escrow")
        account = account_after(slot, one)
    return total, account


@given(st.lists(st.tuples(points, shares), min_size=1, max_size=10), shares)
def test_escrow_sums_to_the_credit_of_the_fossilized_seed(seen: list[tuple[float, float]], start: float) -> None:
    account = SeedAccount(accuracy_at_germination=start)
    measured, accuracies = zip(*seen, strict=True)
    alive = [slot_step(BLENDING, contribution=c, account=account) for c in measured]
    total, owed = escrow_total(alive, list(accuracies))
    assert total == pytest.approx(owed.credit)
    after = [slot_step(ON_PROBATION, KEPT, contribution=9.0), slot_step(KEPT, contribution=-50.0)]
    kept, frozen = escrow_total([*alive, *after], [*accuracies, 0.9, 0.1], last=True)
    assert kept == pytest.approx(frozen.credit) == pytest.approx(owed.credit)


@pytest.mark.parametrize(
    ("slot", "last"),
    [
        (slot_step(BLENDING, CULLED), False),
        (slot_step(ON_PROBATION, ON_PROBATION, CULLED, contribution=50.0), False),
        (slot_step(ON_PROBATION, contribution=50.0), True),
    ],
    ids=["culled", "went by itself", "not fossilized in time"],
)
def test_escrow_takes_everything_back_from_a_seed_that_is_not_kept(slot: SlotStep, last: bool) -> None:
    alive = [slot_step(BLENDING, contribution=40.0, account=SeedAccount(accuracy_at_germination=0.1))] * 5
    assert escrow_total(alive, [0.5] * 5)[0] == 10.0
    assert escrow_total([*alive, slot], [0.5] * 6, last) == (0.0, SeedAccount(accuracy_at_germination=0.1, credit=0.0))


@pytest.mark.parametrize("settings", [{"shaping": -1.0}, {"rent": float("inf")}, {"budget": 0.0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"reward.{next(iter(settings))} must be"):
        RewardConfig(**settings)
