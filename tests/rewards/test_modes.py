"""Reward modes: properties that hold for every mode in any step, and the terms of each mode."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import MODES, Account, ModeName, RewardConfig, Seed, SlotTick, Tick, bound, pay, settled
from tests.rewards.ticks import EMPTY, arbitrary_ticks, life, points, shares, slot_tick, tick

ALL = get_args(ModeName)

KEPT = Seed(Stage.FOSSILIZED, 0, 4, False)
ON_PROBATION = Seed(Stage.PROBATIONARY, 3, 4, False)
BLENDING = Seed(Stage.BLENDING, 2, 3, False)
CULLED = Seed(Stage.CULLED, 0, 0, False)


def reward(one: Tick, mode: ModeName, **settings: float) -> float:
    return sum(pay(one, RewardConfig(mode=mode, **settings)).values())


@pytest.mark.parametrize("mode", ALL)
@given(one=arbitrary_ticks)
def test_every_term_and_every_reward_is_within_its_bound(mode: ModeName, one: Tick) -> None:
    config, slots = RewardConfig(mode=mode), len(one.slots)
    paid = pay(one, config)
    for name, term in MODES[mode].items():
        assert abs(paid[name]) <= term.bound(config, slots) + 1e-9, name
    assert abs(sum(paid.values())) <= bound(config, slots) + 1e-9


def test_bounds_of_three_slots() -> None:
    stated = {mode: bound(RewardConfig(mode=mode), 3) for mode in ALL}
    assert stated == pytest.approx({
        "objective": 2.0, "kept": 2.0, "sparse": 1.0, "minimal": 1.1, "simplified": 16.21, "shaped": 615.92,
        "basic": 16.2, "basic_plus": 14.4, "escrow": 300.0, "loss": 7.0,
    })  # fmt: skip


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
    cycle = [("WAIT", slot_tick(EMPTY))] * waits + life(advances)
    there = [tick(slot, op=op, last=last and i == len(cycle) - 1) for i, (op, slot) in enumerate(cycle)]
    idle = [tick(slot_tick(EMPTY), last=one.last) for one in there]
    value, nothing = (sum(gamma**t * sum(pay(one, config).values()) for t, one in enumerate(t)) for t in (there, idle))
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
    account = Account(start=accuracies[0])
    total, last = 0.0, 0.0
    for contribution, accuracy in zip(measured, accuracies[1:], strict=False):
        slot = slot_tick(BLENDING, account=account, contribution=contribution, contribution_before=last)
        account = settled(slot, tick(slot, accuracy=accuracy, bare=accuracy))
        paid = pay(tick(slot, accuracy=accuracy, bare=accuracy), RewardConfig(mode=mode))
        total, last = total + paid.get("attribution", 0.0) + paid.get("credit", 0.0), contribution
    slot = slot_tick(BLENDING, CULLED, account=account, contribution_before=last)
    paid = pay(tick(slot, op="CULL"), RewardConfig(mode=mode))
    assert total + paid.get("attribution", 0.0) + paid.get("credit", 0.0) <= 1e-9


@pytest.mark.parametrize("mode", ["simplified", "shaped", "basic", "basic_plus"])
def test_shaping_of_a_whole_episode_is_nothing_unless_it_goes_on_beyond_the_horizon(mode: ModeName) -> None:
    first = slot_tick(EMPTY, Seed(Stage.GERMINATED, 0, 0, False), ON_PROBATION)
    last = slot_tick(ON_PROBATION, KEPT, KEPT._replace(ticks_in_stage=1))
    config = RewardConfig(mode=mode)
    assert pay(tick(first), config)["shaping"] == pytest.approx(0.3 * 6.4)
    assert pay(tick(last, last=True), config)["shaping"] == pytest.approx(-0.3 * 6.4)
    beyond = replace(config, horizon_is_end=False)
    assert pay(tick(last, last=True), beyond)["shaping"] == pytest.approx(0.3 * (6.3 - 6.4))


@pytest.mark.parametrize("mode", ALL)
def test_after_a_rollback_what_was_lent_is_taken_back_and_nothing_else_counts(mode: ModeName) -> None:
    lent = slot_tick(BLENDING, account=Account(start=0.1, credit=4.0), contribution=60.0, contribution_before=50.0)
    paid = pay(tick(lent, diverged=True, accuracy=0.9, objective=0.9, last=True), RewardConfig(mode=mode))
    expected = {"shaping": pytest.approx(-0.3 * 4.1), "credit": -4.0}
    assert paid == {name: expected.get(name, 0.0) for name in MODES[mode]}


def test_sparse_pays_the_objective_when_all_is_over() -> None:
    assert reward(tick(objective=0.7), "sparse") == 0.0
    assert reward(tick(objective=0.7, last=True), "sparse") == 0.7


def test_minimal_asks_for_patience() -> None:
    young, old = Seed(Stage.TRAINING, 1, 4, False), Seed(Stage.TRAINING, 1, 5, False)
    fading = BLENDING._replace(fading=True)
    assert reward(tick(slot_tick(young, CULLED), op="CULL"), "minimal") == -0.1
    assert reward(tick(slot_tick(old, CULLED), op="CULL"), "minimal") == 0.0
    assert reward(tick(slot_tick(BLENDING, fading), op="CULL"), "minimal") == -0.1
    assert reward(tick(slot_tick(fading, fading, CULLED)), "minimal") == 0.0  # the cost is charged once


def test_simplified_counts_good_fossils_at_the_end() -> None:
    good, poor = (slot_tick(KEPT, contribution=c) for c in (1.0, 0.9))
    paid = pay(tick(good, poor, last=True, kept_accuracy=0.8, op="FOSSILIZE"), RewardConfig(mode="simplified"))
    assert paid == {"shaping": pytest.approx(-0.3 * 12.0), "op": -0.01, "end": pytest.approx(2.4), "fossils": 2.0}


def test_shaped_pays_for_contributions_and_takes_the_last_one_back() -> None:
    account = Account(start=0.3)
    there = slot_tick(BLENDING, account=account, contribution=30.0, growth=0.5)
    paid = pay(tick(there, accuracy=0.5, bare=0.4), RewardConfig(mode="shaped"))
    assert paid["attribution"] == pytest.approx((20.0 * 30.0) ** 0.5)
    assert paid["rent"] == pytest.approx(-0.5 * 0.4054651)
    gone = slot_tick(BLENDING, CULLED, account=account, contribution_before=30.0)
    paid = pay(tick(gone, accuracy=0.2, accuracy_before=0.5, bare_before=0.4, op="CULL"), RewardConfig(mode="shaped"))
    assert paid["attribution"] == pytest.approx(-((20.0 * 30.0) ** 0.5))
    assert paid["op"] == -0.005
    left = slot_tick(ON_PROBATION, ON_PROBATION, CULLED, account=account, contribution=-2.0)
    paid = pay(tick(left, accuracy=0.5, bare=0.5), RewardConfig(mode="shaped"))
    assert (paid["attribution"], paid["auto_cull"]) == (-2.0, -0.2)


def test_shaped_warns() -> None:
    worse = slot_tick(BLENDING, account=Account(start=0.9))
    late = slot_tick(ON_PROBATION, contribution_before=2.0)
    needed = slot_tick(BLENDING, account=Account(start=0.5), contribution=3.0)
    config = RewardConfig(mode="shaped")
    assert pay(tick(worse), config)["warnings"] == pytest.approx(-0.2)
    assert pay(tick(late), config)["warnings"] == pytest.approx(-0.15)
    assert pay(tick(late, op="GERMINATE"), config)["warnings"] == 0.0
    assert pay(tick(needed, bare=0.6), config)["ransom"] == -0.3
    assert pay(tick(needed, bare=0.4), config)["ransom"] == 0.0


def test_basic_pays_the_bonus_at_once_and_basic_plus_by_and_by() -> None:
    kept = slot_tick(ON_PROBATION, KEPT, contribution=5.0, account=Account(rest=10), growth=2.0, alpha=0.5)
    assert pay(tick(kept), RewardConfig(mode="basic"))["bonus"] == 0.5
    assert pay(tick(kept), RewardConfig(mode="basic"))["rent"] == pytest.approx(-0.1)
    assert pay(tick(kept), RewardConfig(mode="basic", budget=2.0))["rent"] == pytest.approx(-0.05)
    rest = [pay(tick(kept), plus := RewardConfig(mode="basic_plus"))]
    rest += [pay(tick(slot_tick(KEPT, contribution=5.0, account=Account(rest=10))), plus) for _ in range(9)]
    assert sum(paid["bonus"] for paid in rest) == pytest.approx(0.15)
    assert sum(paid["drip"] for paid in rest) == pytest.approx(0.35)


def test_basic_pays_for_what_the_host_has_gained_with_what_is_kept() -> None:
    one = tick(last=True, accuracy=0.9, kept_accuracy=0.7, accuracy_at_start=0.1)
    assert pay(one, RewardConfig(mode="basic"))["end"] == pytest.approx(3.0)


def escrow(slots: list[SlotTick], accuracies: list[float], last: bool = False) -> tuple[float, Account]:
    """Return the sum of all that is paid for one seed, and its account."""
    total, account = 0.0, slots[0].account
    for i, (slot, accuracy) in enumerate(zip(slots, accuracies, strict=True)):
        slot = slot._replace(account=account)
        one = tick(slot, accuracy=accuracy, last=last and i == len(slots) - 1)
        total += reward(one, "escrow")
        account = settled(slot, one)
    return total, account


@given(st.lists(st.tuples(points, shares), min_size=1, max_size=10), shares)
def test_escrow_pays_in_all_what_the_kept_seed_is_credited_with(seen: list[tuple[float, float]], start: float) -> None:
    account = Account(start=start)
    measured, accuracies = zip(*seen, strict=True)
    alive = [slot_tick(BLENDING, contribution=c, account=account) for c in measured]
    total, owed = escrow(alive, list(accuracies))
    assert total == pytest.approx(owed.credit)
    after = [slot_tick(ON_PROBATION, KEPT, contribution=9.0), slot_tick(KEPT, contribution=-50.0)]
    kept, frozen = escrow([*alive, *after], [*accuracies, 0.9, 0.1], last=True)
    assert kept == pytest.approx(frozen.credit) == pytest.approx(owed.credit)


@pytest.mark.parametrize(
    ("slot", "last"),
    [
        (slot_tick(BLENDING, CULLED), False),
        (slot_tick(ON_PROBATION, ON_PROBATION, CULLED, contribution=50.0), False),
        (slot_tick(ON_PROBATION, contribution=50.0), True),
    ],
    ids=["culled", "went by itself", "not kept in time"],
)
def test_escrow_takes_everything_back_from_a_seed_that_is_not_kept(slot: SlotTick, last: bool) -> None:
    alive = [slot_tick(BLENDING, contribution=40.0, account=Account(start=0.1))] * 5
    assert escrow(alive, [0.5] * 5)[0] == 10.0
    assert escrow([*alive, slot], [0.5] * 6, last) == (0.0, Account(start=0.1, credit=0.0))


def test_a_fall_of_the_loss_pays_and_a_young_seed_is_free() -> None:
    young, old = (slot_tick(BLENDING._replace(age=age), growth=1.0) for age in (2, 3))
    paid = pay(tick(young, old, loss_before=1.0, loss=0.8), RewardConfig(mode="loss"))
    assert paid == {"loss": pytest.approx(2.0), "rent": pytest.approx(-0.5 * 0.6931472), "end": 0.0}
    assert pay(tick(last=True, kept_loss=1.15), RewardConfig(mode="loss"))["end"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "settings", [{"shaping": -1.0}, {"rent": float("inf")}, {"budget": 0.0}, {"loss_deviation": -0.1}]
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"reward.{next(iter(settings))} must be"):
        RewardConfig(**settings)
