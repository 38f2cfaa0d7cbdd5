"""Synthetic environment steps for rewards."""

from typing import Any

from esper_lightning.envs.rewards import HostStep, SlotStatus, SlotStep
from esper_lightning.growth.stages import Stage

EMPTY = SlotStatus(Stage.DORMANT, 0, 0)

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
