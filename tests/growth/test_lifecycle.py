"""Lifecycle of a seed, checked by the events that the operations return."""

from collections.abc import Callable

import pytest
import torch

from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.lifecycle import (
    SeedEvent,
    advance,
    auto_transition,
    check_slot_names,
    count_parameters,
    cull,
    fossilize,
    germinate,
    retarget_alpha,
    slots_of,
)
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import CALM, LIFE, SLOTS, evidence_of, generator_of, grow, loss_of, slot_named, small_cnn

THREE_TICKS = Ramp(3)


def image_slot() -> SeedSlot:
    return SeedSlot("block1", "image", 4)


def pass_tick(slot: SeedSlot, config: LifecycleConfig, contribution: float | None = 2.0) -> list[str]:
    """Run one host epoch and return its changes of stage, like `TRAINING: placed`."""
    slot.end_epoch()
    events = auto_transition(slot, evidence_of(slot, contribution), config, horizon=50)
    return [f"{event.after.name}: {event.cause}" for event in events]


def test_a_seed_grows_from_germination_to_fossil_in_its_time() -> None:
    network, config = small_cnn(), LifecycleConfig(training_ticks=3)
    slot = slot_named(network, "block2.pool")
    before = count_parameters(network)

    born = germinate(slot, "conv_small", THREE_TICKS, generator=generator_of())
    lived = [pass_tick(slot, config) for _ in range(8)]
    kept = fossilize(slot)

    assert born == SeedEvent(
        "block2.pool", "conv_small", before=Stage.DORMANT, after=Stage.GERMINATED, cause="germinate"
    )
    assert lived == [
        ["TRAINING: placed"],
        [],
        [],
        ["BLENDING: ready to blend"],  # three ticks in TRAINING
        [],
        [],
        ["PROBATIONARY: alpha reached its target"],  # after three host epochs at 1/3, 2/3 and 1
        [],
    ]
    assert kept == SeedEvent(
        "block2.pool", "conv_small", before=Stage.PROBATIONARY, after=Stage.FOSSILIZED, cause="fossilize"
    )
    assert [pass_tick(slot, config, contribution=-9.0) for _ in range(20)] == [[]] * 20
    assert count_parameters(network) == before + 8 * 8 + 8


def test_without_waiting_times_a_seed_blends_after_its_first_tick_and_its_slot_reopens_at_once() -> None:
    slot, config = image_slot(), LifecycleConfig(embargo_ticks=0)
    germinate(slot, "norm", THREE_TICKS._replace(ticks=1), generator=generator_of())
    assert pass_tick(slot, config) == ["TRAINING: placed", "BLENDING: ready to blend"]
    assert slot.alpha.item() == 1.0
    assert pass_tick(slot, config) == ["PROBATIONARY: alpha reached its target"]
    cull(slot)
    assert pass_tick(slot, config) == ["EMBARGOED: removed", "DORMANT: embargo over"]
    germinate(slot, "norm", generator=generator_of())


def test_the_tick_of_germination_does_not_count_as_training() -> None:
    slot, config = image_slot(), LifecycleConfig(training_ticks=1)
    germinate(slot, "norm", THREE_TICKS, generator=generator_of())
    assert [pass_tick(slot, config) for _ in range(2)] == [["TRAINING: placed"], ["BLENDING: ready to blend"]]


def test_a_slot_stays_closed_for_five_ticks_after_a_cull() -> None:
    slot, config = image_slot(), LifecycleConfig()
    grow(slot, Stage.TRAINING)
    cull(slot)
    passed = [pass_tick(slot, config) for _ in range(7)]
    assert passed == [["EMBARGOED: removed"], [], [], [], [], ["DORMANT: embargo over"], []]


@pytest.mark.parametrize("stage", LIFE[:-1], ids=lambda stage: stage.name)
def test_culling_removes_every_trace_of_a_seed_and_closes_the_slot(stage: Stage) -> None:
    network = small_cnn()
    slot, bare = slot_named(network, "block1.pool"), small_cnn()
    grow(slot, stage, "bottleneck", THREE_TICKS)
    assert cull(slot, "too old") == SeedEvent(
        "block1.pool", "bottleneck", before=stage, after=Stage.CULLED, cause="too old"
    )
    assert slot.stage is Stage.CULLED
    assert (slot.blueprint, slot.age, slot.ticks_in_stage, slot.alpha.item()) == (None, 0, 0, 0.0)
    expected = bare.state_dict()
    assert list(network.state_dict()) == list(expected)
    assert torch.equal(loss_of(network), loss_of(bare))
    with pytest.raises(ValueError, match="CULLED cannot become GERMINATED; allowed: EMBARGOED"):
        germinate(slot, "norm", generator=generator_of())


@pytest.mark.parametrize(
    ("contribution", "ticks", "cause"),
    [
        (-1.5, 1, "contribution -1.50 points is not positive"),
        (0.5, 5, "on probation for 5 ticks"),
    ],
)
def test_a_useless_or_late_seed_is_culled_with_the_reason(contribution: float, ticks: int, cause: str) -> None:
    slot, config = image_slot(), LifecycleConfig()
    grow(slot, Stage.PROBATIONARY)
    assert [pass_tick(slot, config, contribution) for _ in range(ticks)] == [[]] * (ticks - 1) + [[f"CULLED: {cause}"]]
    assert list(slot.parameters()) == []


@pytest.mark.parametrize(("training_ticks", "reported_at"), [(3, 6), (1, 2), (0, 1)])
@pytest.mark.parametrize("auto_blend", [True, False])
def test_a_seed_that_is_stuck_in_training_says_so_once_with_the_reasons(
    training_ticks: int, reported_at: int, auto_blend: bool
) -> None:
    slot = image_slot()
    grow(slot, Stage.TRAINING)
    config = LifecycleConfig(training_ticks=training_ticks, min_potential=1.0, auto_blend=auto_blend)
    events = {}
    for tick in range(1, 11):
        slot.end_epoch()
        evidence = evidence_of(slot, gradient=CALM._replace(exploded=1.0), potential=-2.5)
        events[tick] = auto_transition(slot, evidence, config, horizon=50)
    (event,) = events.pop(reported_at)
    assert str(event) == (
        "block1: conv_light TRAINING (stuck: gradient health 0.20 below 0.7; potential -2.50 points below 1)"
    )
    assert (event.ticks_before, event.age) == (reported_at, reported_at)
    assert set(map(len, events.values())) == {0}
    assert slot.stage is Stage.TRAINING


def test_a_seed_that_no_optimizer_holds_waits() -> None:
    slot, config = image_slot(), LifecycleConfig(training_ticks=1)
    germinate(slot, "norm", generator=generator_of())
    for _ in range(3):
        slot.end_epoch()
        assert auto_transition(slot, evidence_of(slot, in_optimizer=False), config, horizon=50) == []
    assert pass_tick(slot, config) == ["TRAINING: placed"]


def test_where_it_is_switched_off_nothing_advances_by_itself() -> None:
    slot, config = image_slot(), LifecycleConfig(auto_blend=False, auto_probation=False)
    germinate(slot, "norm", THREE_TICKS, generator=generator_of())
    assert pass_tick(slot, config) == ["TRAINING: placed"]
    assert [pass_tick(slot, config) for _ in range(9)] == [[]] * 9
    assert advance(slot) == SeedEvent("block1", "norm", before=Stage.TRAINING, after=Stage.BLENDING, cause="advance")
    assert [pass_tick(slot, config) for _ in range(9)] == [[]] * 9
    assert slot.alpha.item() == 1.0
    assert advance(slot) == SeedEvent(
        "block1", "norm", before=Stage.BLENDING, after=Stage.PROBATIONARY, cause="advance"
    )


def test_what_fades_is_culled_when_nothing_is_left_of_it_and_for_no_other_reason() -> None:
    slot, config = image_slot(), LifecycleConfig(probation_ticks=0, probation_share=0.0)
    grow(slot, Stage.PROBATIONARY)
    event = retarget_alpha(slot, 0.0, 4, curve="linear")
    assert event == SeedEvent(
        "block1", "conv_light", before=Stage.PROBATIONARY, after=Stage.PROBATIONARY, cause="alpha to 0 in 4 ticks"
    )
    lived = [(slot.alpha.item(), pass_tick(slot, config, contribution=-5.0)) for _ in range(3)]
    assert lived == [(0.75, []), (0.5, []), (0.25, ["CULLED: faded out"])]


def test_a_seed_that_fades_in_blending_does_not_reach_probation() -> None:
    slot, config = image_slot(), LifecycleConfig(min_alpha_reached=0.0)
    grow(slot, Stage.BLENDING)
    slot.end_epoch()
    retarget_alpha(slot, 0.0, 3, curve="cosine")
    with pytest.raises(ValueError, match=r"^slot 'block1': the seed is being culled and cannot advance; set_alpha "):
        advance(slot)
    lived = [(slot.alpha.item(), pass_tick(slot, config)) for _ in range(2)]
    assert lived == [(0.75, []), (0.25, ["CULLED: faded out"])]


@pytest.mark.parametrize("asked", [[1.0], [0.1, 1.0], [0.0, 0.5, 0.0, 1.0]], ids=str)
def test_alpha_goes_on_from_what_the_host_has_seen_last_whatever_was_asked_in_between(asked: list[float]) -> None:
    slot = image_slot()
    grow(slot, Stage.BLENDING, ramp=THREE_TICKS._replace(ticks=4))
    slot.end_epoch()
    assert slot.alpha.item() == 0.5  # but alpha was 1/4 in the last epoch
    for target in asked:
        retarget_alpha(slot, target, 3, curve="linear")
    assert (slot.alpha_before, slot.alpha.item(), slot.alpha_velocity) == (0.25, 0.5, 0.25)
    slot.end_epoch()
    assert slot.alpha.item() == 0.75


def test_a_seed_that_is_given_another_alpha_has_its_probation_again_from_when_alpha_rests() -> None:
    slot, config = image_slot(), LifecycleConfig(probation_ticks=3, probation_share=0.0)
    grow(slot, Stage.PROBATIONARY)
    assert [pass_tick(slot, config) for _ in range(2)] == [[]] * 2
    retarget_alpha(slot, 0.5, 2, curve="linear")
    assert slot.ticks_in_stage == 0
    assert [pass_tick(slot, config) for _ in range(3)] == [[], [], ["CULLED: on probation for 3 ticks"]]


@pytest.mark.parametrize(
    ("contribution", "limit", "cause"),
    [(-1.0, 9, "contribution -1.00 points is not positive"), (2.0, 1, "on probation for 1 ticks")],
)
def test_no_seed_is_culled_by_itself_while_its_alpha_moves(contribution: float, limit: int, cause: str) -> None:
    slot, config = image_slot(), LifecycleConfig(probation_ticks=limit, probation_share=0.0)
    grow(slot, Stage.PROBATIONARY)
    retarget_alpha(slot, 0.5, 3, curve="linear")
    lived = [pass_tick(slot, config, contribution) for _ in range(3)]
    assert lived == [[], [], [f"CULLED: {cause}"]]  # after the third epoch, the first at 1/2


@pytest.mark.parametrize("stage", list(Stage), ids=lambda stage: stage.name)
def test_operations_out_of_turn_are_refused_and_change_nothing(stage: Stage) -> None:
    ramping = {Stage.BLENDING, Stage.PROBATIONARY}
    operations: list[tuple[Callable[[SeedSlot], SeedEvent], set[Stage], str]] = [
        (
            lambda slot: germinate(slot, "norm", generator=generator_of()),
            {Stage.DORMANT},
            f"{stage.name} cannot become",
        ),
        (fossilize, {Stage.PROBATIONARY}, f"{stage.name} cannot become"),
        (cull, set(LIFE[:-1]), f"{stage.name} cannot become"),
        (advance, {Stage.TRAINING, Stage.BLENDING}, f"nothing to advance in {stage.name}"),
        (lambda slot: retarget_alpha(slot, 0.5, 3, curve="linear"), ramping, f"alpha does not move in {stage.name}"),
    ]
    for operation, possible, refusal in operations:
        slot = image_slot()
        if stage in LIFE:
            grow(slot, stage, "conv_small", THREE_TICKS)
        else:
            slot.stage = stage
        seed, ramp, alpha = slot.seed, slot.ramp, slot.alpha.clone()
        if stage in possible:
            assert operation(slot).before is stage
        else:
            with pytest.raises(ValueError, match=f"slot 'block1': {refusal}"):
                operation(slot)
            assert (slot.stage, slot.seed, slot.ramp, slot.alpha) == (stage, seed, ramp, alpha)


@pytest.mark.parametrize(
    ("blueprint", "layout", "message"),
    [("conv_smal", "image", "did you mean 'conv_small'"), ("conv_small", "sequence", "does not grow on sequence")],
)
def test_a_blueprint_that_cannot_grow_leaves_the_slot_empty(blueprint: str, layout: str, message: str) -> None:
    slot = SeedSlot("block1", layout, 4)
    with pytest.raises(ValueError, match=message):
        germinate(slot, blueprint, generator=generator_of())
    assert (slot.stage, slot.blueprint) == (Stage.DORMANT, None)


def test_slots_are_found_by_name_in_the_order_of_the_datas_way() -> None:
    assert list(slots_of(small_cnn(list(reversed(SLOTS))))) == SLOTS


def test_two_slots_of_one_name_are_refused() -> None:
    twins = torch.nn.Sequential(image_slot(), image_slot())
    with pytest.raises(ValueError, match=r"^slot 'block1' is named twice; name each slot once$"):
        slots_of(twins)


def test_slot_names_are_checked_with_the_way_out() -> None:
    check_slot_names([], SLOTS)
    check_slot_names(("block3", "block1"), iter(SLOTS))
    with pytest.raises(ValueError, match=r"^unknown slot 'block2\.pol'; did you mean 'block2\.pool'\?$"):
        check_slot_names(["block1", "block2.pol"], SLOTS)
    with pytest.raises(ValueError, match=r"^unknown slot 'xyz'; there are: a, b$"):
        check_slot_names(["xyz"], ["a", "b"])
    with pytest.raises(ValueError, match=r"^slot 'block1' is named twice; name each slot once$"):
        check_slot_names(["block1", "block2", "block1"], SLOTS)
