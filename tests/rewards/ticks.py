"""Synthetic environment steps for rewards: steps that hosts seldom take, and arbitrary ones."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from esper_lightning.envs.rewards import HostStep, RewardConfig, SlotStatus, SlotStep
from esper_lightning.envs.rewards.modes import MAX_RENT, SHAPING
from esper_lightning.growth.stages import Stage

ALL = ("objective", "kept", "sparse", "shaped")

EMPTY = SlotStatus(Stage.DORMANT, 0, 0)
NEXT = {Stage.GERMINATED: Stage.TRAINING, Stage.TRAINING: Stage.BLENDING, Stage.BLENDING: Stage.PROBATIONARY}

NUMBERS = [name for name, kind in HostStep.__annotations__.items() if kind is float]


def slot_step(
    before: SlotStatus, acted: SlotStatus | None = None, after: SlotStatus | None = None, **facts: float
) -> SlotStep:
    """Return one slot in a step in which nothing is measured except `facts`."""
    usual = dict.fromkeys(("score_at_germination", "contribution_before", "contribution", "growth"), 0.0)
    acted = before if acted is None else acted
    return SlotStep(before, acted, acted if after is None else after, **usual | facts)


def host_step(*slots: SlotStep, **facts: Any) -> HostStep:
    """Return one host's step in which nothing changes except `facts`."""
    usual = {"op": "WAIT", "already_ended": False, "at_horizon": False, "diverged": False}
    return HostStep(**dict.fromkeys(NUMBERS, 0.5) | usual | facts, slots=slots)


def term_bounds(config: RewardConfig, slots: int) -> dict[str, float]:
    """Return an upper bound of the absolute value of each term of the mode in one step."""
    return {
        "objective": {"objective": 2.0},
        "kept": {"kept": 2.0},
        "sparse": {"end": 1.0},
        "shaped": {
            "attribution": 200.0 * slots,
            "ransom": 0.3 * slots,
            "shaping": SHAPING * 8.0 * slots,
            "rent": MAX_RENT,
            "warnings": 0.4 * slots,
            "op": 0.02,
            "auto_cull": 0.2 * slots,
            "end": 5.0,
        },
    }[config.mode]


def seed_life(advances: Sequence[bool], growth: float = 0.3, start: float = 0.5) -> list[tuple[str, SlotStep]]:
    """Return op and slot, tick by tick, of a seed that is germinated, advances at the end of the ticks in `advances`,
    and is culled; nothing depends on the seed."""
    ticks: list[tuple[str, SlotStep]] = []
    before, acted, op = EMPTY, SlotStatus(Stage.GERMINATED, 0, 0), "GERMINATE"
    for age, advance in enumerate(advances, 1):
        stage = NEXT.get(acted.stage, acted.stage) if advance else acted.stage
        after = SlotStatus(stage, 0 if stage is not acted.stage else acted.ticks_in_stage + 1, age)
        ticks.append((op, slot_step(before, acted, after, score_at_germination=start, growth=growth)))
        before, acted, op = after, after, "WAIT"
    gone = SlotStatus(Stage.CULLED, 0, 0), SlotStatus(Stage.EMBARGOED, 0, 0)
    return [*ticks, ("CULL", slot_step(before, *gone, score_at_germination=start))]


shares = st.floats(0.0, 1.0)
points = st.floats(-100.0, 100.0)
losses = st.floats(0.0) | st.just(float("nan"))
seeds = st.builds(SlotStatus, st.sampled_from(Stage), st.integers(0, 200), st.integers(0, 200))
slots = st.builds(SlotStep, seeds, seeds, seeds, shares, points, points, growth=st.floats(0.0, 1e6))
arbitrary_ticks = st.builds(
    HostStep,
    op=st.sampled_from(["WAIT", "GERMINATE", "CULL", "FOSSILIZE"]),
    **dict.fromkeys(("already_ended", "at_horizon", "diverged"), st.booleans()),
    **{name: losses if "loss" in name else st.floats(-1.0, 1.0) if "objective" in name else shares for name in NUMBERS},
    slots=st.lists(slots, max_size=3).map(tuple),
)
"""Strategy for arbitrary steps, including ones that no host can take."""
