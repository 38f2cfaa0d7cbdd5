"""Transition table of stages, compared with the one in the documentation."""

from itertools import product

import pytest

from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage, check_transition

FOLLOWERS = {
    "DORMANT": ["GERMINATED"],
    "GERMINATED": ["TRAINING", "CULLED"],
    "TRAINING": ["BLENDING", "CULLED"],
    "BLENDING": ["PROBATIONARY", "CULLED"],
    "PROBATIONARY": ["FOSSILIZED", "CULLED"],
    "FOSSILIZED": [],
    "CULLED": ["EMBARGOED"],
    "EMBARGOED": ["DORMANT"],
}


@pytest.mark.parametrize(("before", "after"), list(product(Stage, Stage)), ids=lambda stage: stage.name)
def test_a_stage_follows_another_or_the_error_names_what_may(before: Stage, after: Stage) -> None:
    slot = SeedSlot("block1", "image", 4)
    slot.stage = before
    allowed = FOLLOWERS[before.name]
    if after.name in allowed:
        check_transition("block1", before, after)
        slot.move_to(after)
        assert slot.stage is after
        return
    told = ", ".join(allowed) if allowed else "nothing (final)"
    message = f"slot 'block1': {before.name} cannot become {after.name}; allowed: {told}"
    for forbidden in (lambda: check_transition("block1", before, after), lambda: slot.move_to(after)):
        with pytest.raises(ValueError) as refusal:
            forbidden()
        assert str(refusal.value) == message
    assert slot.stage is before


def test_the_table_above_names_every_stage_once() -> None:
    assert list(FOLLOWERS) == [stage.name for stage in Stage]


def test_stages_number_the_places_of_a_one_hot_code() -> None:
    assert [int(stage) for stage in Stage] == list(range(8))


@pytest.mark.parametrize(
    ("stage", "occupied", "live", "blended"),
    [
        (Stage.DORMANT, False, False, False),
        (Stage.GERMINATED, True, True, False),
        (Stage.TRAINING, True, True, False),
        (Stage.BLENDING, True, True, True),
        (Stage.PROBATIONARY, True, True, True),
        (Stage.FOSSILIZED, True, False, True),
        (Stage.CULLED, False, False, False),
        (Stage.EMBARGOED, False, False, False),
    ],
)
def test_a_stage_says_whether_the_slot_holds_a_seed_and_what_kind(
    stage: Stage, occupied: bool, live: bool, blended: bool
) -> None:
    slot = SeedSlot("block1", "image", 4)
    slot.stage = stage
    assert (slot.occupied, slot.live, slot.blended) == (occupied, live, blended)
