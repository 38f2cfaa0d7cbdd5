"""Synthetic environment steps for rewards: steps that hosts seldom take, and arbitrary ones."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import Account, Seed, SlotTick, Tick

EMPTY = Seed(Stage.DORMANT, 0, 0, False)
NEXT = {Stage.GERMINATED: Stage.TRAINING, Stage.TRAINING: Stage.BLENDING, Stage.BLENDING: Stage.PROBATIONARY}


def slot_tick(before: Seed, acted: Seed | None = None, after: Seed | None = None, **facts: Any) -> SlotTick:
    """Return one slot in a step in which nothing is measured except `facts`."""
    usual = {"account": Account(), "contribution_before": 0.0, "contribution": 0.0, "growth": 0.0, "alpha": 0.0}
    acted = before if acted is None else acted
    return SlotTick(before, acted, acted if after is None else after, **usual | facts)


def tick(*slots: SlotTick, **facts: Any) -> Tick:
    """Return one host's step in which nothing changes except `facts`."""
    usual = {
        "op": "WAIT", "over": False, "last": False, "diverged": False, "objective_before": 0.5, "objective": 0.5,
        "kept_objective_before": 0.5, "kept_objective": 0.5,
        "accuracy_at_start": 0.5, "accuracy_before": 0.5, "accuracy": 0.5, "kept_accuracy": 0.5, "bare_before": 0.5,
        "bare": 0.5, "loss_before": 1.0, "loss": 1.0, "kept_loss": 1.0, "chance": 2.3,
    }  # fmt: skip
    return Tick(**usual | facts, slots=slots)


def life(advances: Sequence[bool], growth: float = 0.3, start: float = 0.5) -> list[tuple[str, SlotTick]]:
    """Return op and slot, tick by tick, of a seed that is germinated, advances at the end of the ticks in `advances`,
    and is culled; nothing depends on the seed."""
    ticks: list[tuple[str, SlotTick]] = []
    before, acted, op = EMPTY, Seed(Stage.GERMINATED, 0, 0, False), "GERMINATE"
    account = Account(start=start)
    for age, advance in enumerate(advances, 1):
        stage = NEXT.get(acted.stage, acted.stage) if advance else acted.stage
        after = Seed(stage, 0 if stage is not acted.stage else acted.ticks_in_stage + 1, age, False)
        ticks.append((op, slot_tick(before, acted, after, account=account, growth=growth, alpha=0.5)))
        before = acted = after
        op = "WAIT"
    culled = Seed(Stage.CULLED, 0, 0, False)
    ticks.append(("CULL", slot_tick(before, culled, Seed(Stage.EMBARGOED, 0, 0, False), account=account)))
    return ticks


shares = st.floats(0.0, 1.0)
points = st.floats(-100.0, 100.0)
losses = st.floats(0.0) | st.just(float("nan"))
seeds = st.builds(Seed, st.sampled_from(Stage), st.integers(0, 200), st.integers(0, 200), st.booleans())
accounts = st.builds(Account, shares, st.integers(0, 200), st.floats(0.0, 100.0))
slots = st.builds(
    SlotTick, seeds, seeds, seeds, accounts, points, points, growth=st.floats(0.0, 1e6), alpha=shares
)  # fmt: skip
arbitrary_ticks = st.builds(
    Tick,
    op=st.sampled_from(["WAIT", "GERMINATE", "CULL", "FOSSILIZE", "ADVANCE", "SET_ALPHA"]),
    over=st.booleans(),
    last=st.booleans(),
    diverged=st.booleans(),
    objective_before=st.floats(-1.0, 1.0),
    objective=st.floats(-1.0, 1.0),
    kept_objective_before=st.floats(-1.0, 1.0),
    kept_objective=st.floats(-1.0, 1.0),
    accuracy_at_start=shares,
    accuracy_before=shares,
    accuracy=shares,
    kept_accuracy=shares,
    bare_before=shares,
    bare=shares,
    loss_before=losses,
    loss=losses,
    kept_loss=losses,
    chance=st.floats(0.1, 12.0),
    slots=st.lists(slots, max_size=3).map(tuple),
)
"""Strategy for arbitrary steps, including ones that no host can take."""
