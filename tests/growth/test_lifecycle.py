"""Lifecycle of a seed: the transition table, and the events that the operations return."""

from itertools import product

import pytest
import torch

from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.lifecycle import auto_transition, check_slot_names, cull, germinate, slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import (
    CALM,
    FOLLOWERS,
    LIFE,
    SLOTS,
    evidence_of,
    generator_of,
    grow,
    loss_of,
    slot_named,
    small_cnn,
)


def image_slot() -> SeedSlot:
    return SeedSlot("block1", "image", 4)


@pytest.mark.parametrize(("before", "after"), list(product(Stage, Stage)), ids=lambda stage: stage.name)
def test_a_stage_follows_another_or_the_error_names_what_may(before: Stage, after: Stage) -> None:
    slot = image_slot()
    slot.stage = before
    allowed = FOLLOWERS[before.name]
    if after.name in allowed:
        slot.move_to(after)
        assert slot.stage is after
        return
    told = ", ".join(allowed) if allowed else r"nothing \(final\)"
    with pytest.raises(ValueError, match=f"^slot 'block1': {before.name} cannot become {after.name}; allowed: {told}$"):
        slot.move_to(after)
    assert slot.stage is before


def pass_tick(slot: SeedSlot, config: LifecycleConfig, contribution: float | None = 2.0, **options: bool) -> list[str]:
    """Run one host epoch and return its changes of stage, like `TRAINING: placed`."""
    slot.end_epoch()
    events = auto_transition(slot, evidence_of(slot, contribution), config, horizon=50, **options)
    return [f"{event.after.name}: {event.cause}" for event in events]


def test_without_waiting_times_a_seed_blends_after_its_first_tick_and_its_slot_reopens_at_once() -> None:
    slot, config = image_slot(), LifecycleConfig(embargo_ticks=0)
    germinate(slot, "norm", generator=generator_of())
    assert pass_tick(slot, config) == ["TRAINING: placed", "BLENDING: ready to blend"]
    assert slot.alpha.item() == 1.0
    assert pass_tick(slot, config) == ["PROBATIONARY: alpha reached its target"]
    cull(slot)
    assert pass_tick(slot, config) == ["EMBARGOED: removed", "DORMANT: embargo over"]
    germinate(slot, "norm", generator=generator_of())


def test_a_held_seed_advances_neither_to_blending_nor_to_probation() -> None:
    slot, config = image_slot(), LifecycleConfig(auto_cull=False)
    germinate(slot, "norm", generator=generator_of())
    assert [pass_tick(slot, config, hold=True) for _ in range(3)] == [["TRAINING: placed"], [], []]
    assert pass_tick(slot, config) == ["BLENDING: ready to blend"]
    assert [pass_tick(slot, config, hold=True) for _ in range(3)] == [[]] * 3
    assert pass_tick(slot, config) == ["PROBATIONARY: alpha reached its target"]


@pytest.mark.parametrize("stage", LIFE[:-1], ids=lambda stage: stage.name)
def test_culling_removes_every_trace_of_a_seed_and_closes_the_slot(stage: Stage) -> None:
    network, bare = small_cnn(), small_cnn()
    slot = slot_named(network, "block1.pool")
    grow(slot, stage, "bottleneck", Ramp(3))
    assert str(cull(slot, "too old")) == f"block1.pool: bottleneck {stage.name} → CULLED (too old)"
    assert (slot.stage, slot.blueprint, slot.age, slot.alpha.item()) == (Stage.CULLED, None, 0, 0.0)
    assert list(network.state_dict()) == list(bare.state_dict())
    assert torch.equal(loss_of(network), loss_of(bare))
    with pytest.raises(ValueError, match="CULLED cannot become GERMINATED; allowed: EMBARGOED"):
        germinate(slot, "norm", generator=generator_of())


@pytest.mark.parametrize(("training_ticks", "told"), [(0, 1), (3, 6)])
def test_a_seed_that_is_stuck_in_training_says_so_once_with_the_reasons(training_ticks: int, told: int) -> None:
    slot, events = image_slot(), {}
    grow(slot, Stage.TRAINING)
    config = LifecycleConfig(training_ticks=training_ticks)
    for tick in range(1, 11):
        slot.end_epoch()
        evidence = evidence_of(slot, gradient=CALM._replace(exploded=1.0))
        events[tick] = auto_transition(slot, evidence, config, horizon=50)
    (event,) = events.pop(told)
    assert str(event) == "block1: conv_light TRAINING (stuck: gradient health 0.20 below 0.7)"
    assert event.age == told
    assert not any(events.values())


def test_slots_are_found_by_name_in_the_order_of_the_datas_way_and_names_are_checked() -> None:
    assert list(slots_of(small_cnn(list(reversed(SLOTS))))) == SLOTS
    with pytest.raises(ValueError, match=r"^slot 'block1' is named twice; name each slot once$"):
        slots_of(torch.nn.Sequential(image_slot(), image_slot()))
    check_slot_names(("block3", "block1"), iter(SLOTS))
    with pytest.raises(ValueError, match=r"^unknown slot 'block2\.pol'; did you mean 'block2\.pool'\?$"):
        check_slot_names(["block1", "block2.pol"], SLOTS)
    with pytest.raises(ValueError, match=r"^unknown slot 'xyz'; there are: a, b$"):
        check_slot_names(["xyz"], ["a", "b"])
