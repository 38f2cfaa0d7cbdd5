"""A seed's whole life, told by the events that the operations return."""

import pytest
import torch

from esper_lightning.growth.alpha import FULL, Ramp
from esper_lightning.growth.gates import Evidence, LifecycleConfig
from esper_lightning.growth.network import (
    SeedEvent,
    advance,
    check_slot_names,
    count_parameters,
    cull,
    fossilize,
    germinate,
    may_cull,
    may_fossilize,
    slots_of,
)
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import LIFE, SLOTS, grow, loss_of, seeded, slot_named, small_cnn

THREE_TICKS = Ramp(start=0.0, target=1.0, ticks=3, curve="linear")


def image_slot() -> SeedSlot:
    return SeedSlot("block1", "image", 4)


def evidence_of(slot: SeedSlot, contribution: float | None = 2.0, health: float = 1.0) -> Evidence:
    return Evidence(
        slot.ticks_in_stage, slot.ramp.value(slot.ticks_in_stage) / slot.ramp.target, 1.0, health, contribution
    )


def pass_tick(slot: SeedSlot, config: LifecycleConfig, contribution: float | None = 2.0) -> list[str]:
    """One host epoch; the changes of stage it brings, `TRAINING: placed`."""
    slot.tick()
    events = advance(slot, evidence_of(slot, contribution), config, horizon=50)
    return [f"{event.after.name}: {event.cause}" for event in events]


def test_a_seed_grows_from_germination_to_fossil_in_its_time() -> None:
    network, config = small_cnn(), LifecycleConfig()
    slot = slot_named(network, "block2.pool")
    before = count_parameters(network)

    born = germinate(slot, "conv_small", THREE_TICKS, seeded())
    lived = [pass_tick(slot, config) for _ in range(8)]
    kept = fossilize(slot)

    assert born == SeedEvent("block2.pool", "conv_small", Stage.DORMANT, Stage.GERMINATED, "germinate")
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
    assert kept == SeedEvent("block2.pool", "conv_small", Stage.PROBATIONARY, Stage.FOSSILIZED, "fossilize")
    assert [pass_tick(slot, config, contribution=-9.0) for _ in range(20)] == [[]] * 20
    assert count_parameters(network) == before + 8 * 8 + 8


def test_without_waiting_times_a_seed_blends_after_its_first_tick_and_its_slot_reopens_at_once() -> None:
    slot, config = image_slot(), LifecycleConfig(training_ticks=0, embargo_ticks=0)
    germinate(slot, "norm", THREE_TICKS._replace(ticks=1), seeded())
    assert pass_tick(slot, config) == ["TRAINING: placed", "BLENDING: ready to blend"]
    assert slot.alpha.item() == 1.0
    assert pass_tick(slot, config) == ["PROBATIONARY: alpha reached its target"]
    cull(slot)
    assert pass_tick(slot, config) == ["EMBARGOED: removed", "DORMANT: embargo over"]
    germinate(slot, "norm", FULL, seeded())


def test_the_tick_of_germination_does_not_count_as_training() -> None:
    slot, config = image_slot(), LifecycleConfig(training_ticks=1)
    germinate(slot, "norm", THREE_TICKS, seeded())
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
    assert cull(slot, "too old") == SeedEvent("block1.pool", "bottleneck", stage, Stage.CULLED, "too old")
    assert slot.stage is Stage.CULLED
    assert (slot.blueprint, slot.age, slot.ticks_in_stage, slot.alpha.item()) == (None, 0, 0, 0.0)
    expected = bare.state_dict()
    assert list(network.state_dict()) == list(expected)
    assert torch.equal(loss_of(network), loss_of(bare))
    with pytest.raises(ValueError, match="CULLED cannot become GERMINATED; allowed: EMBARGOED"):
        germinate(slot, "norm", FULL, seeded())


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


def test_an_unhealthy_seed_stays_in_training() -> None:
    slot = image_slot()
    grow(slot, Stage.TRAINING)
    for _ in range(10):
        slot.tick()
        assert advance(slot, evidence_of(slot, health=0.2), LifecycleConfig(), horizon=50) == []
    assert slot.stage is Stage.TRAINING


@pytest.mark.parametrize("stage", list(Stage), ids=lambda stage: stage.name)
def test_operations_out_of_turn_are_refused_and_change_nothing(stage: Stage) -> None:
    operations = {
        "germinate": (lambda slot: germinate(slot, "norm", FULL, seeded()), {Stage.DORMANT}),
        "fossilize": (fossilize, {Stage.PROBATIONARY}),
        "cull": (cull, set(LIFE[:-1])),
    }
    for operation, possible in operations.values():
        slot = image_slot()
        if stage in LIFE:
            grow(slot, stage, "conv_small", THREE_TICKS)
        else:
            slot.stage = stage
        seed, alpha = slot.seed, slot.alpha.clone()
        if stage in possible:
            assert operation(slot).before is stage
        else:
            with pytest.raises(ValueError, match=rf"slot 'block1': {stage.name} cannot become"):
                operation(slot)
            assert (slot.stage, slot.seed, slot.alpha) == (stage, seed, alpha)


@pytest.mark.parametrize(
    ("blueprint", "layout", "message"),
    [("conv_smal", "image", "did you mean 'conv_small'"), ("conv_small", "sequence", "does not grow on sequence")],
)
def test_a_blueprint_that_cannot_grow_leaves_the_slot_empty(blueprint: str, layout: str, message: str) -> None:
    slot = SeedSlot("block1", layout, 4)
    with pytest.raises(ValueError, match=message):
        germinate(slot, blueprint, FULL, seeded())
    assert (slot.stage, slot.blueprint) == (Stage.DORMANT, None)


def test_a_seed_may_be_culled_once_it_is_old_enough() -> None:
    slot, config = image_slot(), LifecycleConfig(min_cull_age=2)
    assert not may_cull(slot, config)
    grow(slot, Stage.TRAINING)
    assert [(slot.tick(), may_cull(slot, config))[1] for _ in range(3)] == [False, True, True]
    for stage in (Stage.BLENDING, Stage.PROBATIONARY):
        slot.move_to(stage)
        assert may_cull(slot, config)
    fossilize(slot)
    assert not may_cull(slot, config)


def test_a_seed_may_be_fossilized_on_probation_when_the_gate_says_so() -> None:
    slot, config = image_slot(), LifecycleConfig()
    grow(slot, Stage.BLENDING)
    assert not may_fossilize(slot, evidence_of(slot), config)
    slot.move_to(Stage.PROBATIONARY)
    assert may_fossilize(slot, evidence_of(slot), config)
    assert not may_fossilize(slot, evidence_of(slot, contribution=0.5), config)


def test_slots_are_found_by_name_in_the_order_of_the_datas_way() -> None:
    assert list(slots_of(small_cnn(list(reversed(SLOTS))))) == SLOTS


def test_slot_names_are_checked_with_the_way_out() -> None:
    check_slot_names([], SLOTS)
    check_slot_names(("block3", "block1"), iter(SLOTS))
    with pytest.raises(ValueError, match=r"^unknown slot 'block2\.pol'; did you mean 'block2\.pool'\?$"):
        check_slot_names(["block1", "block2.pol"], SLOTS)
    with pytest.raises(ValueError, match=r"^unknown slot 'xyz'; there are: a, b$"):
        check_slot_names(["xyz"], ["a", "b"])
    with pytest.raises(ValueError, match=r"^slot 'block1' is named twice; name each slot once$"):
        check_slot_names(["block1", "block2", "block1"], SLOTS)
