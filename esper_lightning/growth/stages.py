"""The life of a seed: its stages and which may follow which."""

from enum import IntEnum


class Stage(IntEnum):
    """Where a slot's seed is in its life. The numbers index one-hot observations."""

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

STRAIGHT_THROUGH = frozenset({Stage.GERMINATED, Stage.TRAINING})
"""The seed learns from the loss and leaves the host untouched."""

BLENDED = frozenset({Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED})
"""The seed's output is part of the host's."""

LIVE = frozenset({Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY})
"""The slot holds a seed that is not yet kept for good."""

OCCUPIED = LIVE | {Stage.FOSSILIZED}
"""The slot holds a seed."""


def check_transition(slot: str, before: Stage, after: Stage) -> None:
    """Raises ValueError, naming what is allowed, if a seed cannot go from `before` to `after`."""
    allowed = NEXT_STAGES[before]
    if after not in allowed:
        names = ", ".join(stage.name for stage in sorted(allowed)) or "nothing (final)"
        raise ValueError(f"slot {slot!r}: {before.name} cannot become {after.name}; allowed: {names}")
