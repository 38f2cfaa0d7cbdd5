"""Lifecycle stages of a seed and the allowed transitions between them."""

from enum import IntEnum


class Stage(IntEnum):
    """Lifecycle stage of the seed in a slot. The values index one-hot observations."""

    DORMANT = 0
    GERMINATED = 1
    TRAINING = 2
    BLENDING = 3
    PROBATIONARY = 4
    FOSSILIZED = 5
    CULLED = 6
    EMBARGOED = 7


NEXT_STAGES: dict[Stage, frozenset[Stage]] = {
    Stage.DORMANT: frozenset({Stage.GERMINATED}),
    Stage.GERMINATED: frozenset({Stage.TRAINING, Stage.CULLED}),
    Stage.TRAINING: frozenset({Stage.BLENDING, Stage.CULLED}),
    Stage.BLENDING: frozenset({Stage.PROBATIONARY, Stage.CULLED}),
    Stage.PROBATIONARY: frozenset({Stage.FOSSILIZED, Stage.CULLED}),
    Stage.FOSSILIZED: frozenset(),
    Stage.CULLED: frozenset({Stage.EMBARGOED}),
    Stage.EMBARGOED: frozenset({Stage.DORMANT}),
}
"""Stages that may directly follow each stage."""

ISOLATED = frozenset({Stage.GERMINATED, Stage.TRAINING})
"""Stages in which the seed learns from the loss and does not change the host's output."""

BLENDED = frozenset({Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED})
"""Stages in which the seed's output is part of the host's feature."""

LIVE = frozenset({Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY})
"""Stages in which the slot contains a seed that is not fossilized."""

STAGES_TO_FOSSILIZED = (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED)
"""Stages that a germinated seed passes until it is fossilized, in their order."""

OCCUPIED = LIVE | {Stage.FOSSILIZED}
"""Stages in which the slot contains a seed."""


def check_transition(slot: str, before: Stage, after: Stage) -> None:
    """Raise ValueError, with the allowed stages, if a seed cannot change from `before` to `after`."""
    allowed = NEXT_STAGES[before]
    if after not in allowed:
        names = ", ".join(stage.name for stage in sorted(allowed)) or "nothing (final)"
        raise ValueError(f"slot {slot!r}: {before.name} cannot become {after.name}; allowed: {names}")
