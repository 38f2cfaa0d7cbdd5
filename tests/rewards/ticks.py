"""Synthetic environment steps for rewards: steps that hosts seldom take, and arbitrary ones."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import HostStep, ModeName, RewardConfig, SeedAccount, SlotStatus, SlotStep

EMPTY = SlotStatus(Stage.DORMANT, 0, 0)
NEXT = {Stage.GERMINATED: Stage.TRAINING, Stage.TRAINING: Stage.BLENDING, Stage.BLENDING: Stage.PROBATIONARY}


def slot_step(
    before: SlotStatus, acted: SlotStatus | None = None, after: SlotStatus | None = None, **facts: Any
) -> SlotStep:
    """Return one slot in a step in which nothing is measured except `facts`."""
    usual = {"account": SeedAccount(), "contribution_before": 0.0, "contribution": 0.0, "growth": 0.0, "alpha": 0.0}
    usual |= {"parameters": 0}
    acted = before if acted is None else acted
    return SlotStep(before, acted, acted if after is None else after, **usual | facts)


def host_step(*slots: SlotStep, **facts: Any) -> HostStep:
    """Return one host's step in which nothing changes except `facts`."""
    usual = {
        "op": "WAIT",
        "already_ended": False,
        "at_horizon": False,
        "diverged": False,
        "objective_before": 0.5,
        "objective": 0.5,
        "fossilized_objective_before": 0.5,
        "fossilized_objective": 0.5,
        "accuracy_at_start": 0.5,
        "accuracy_before": 0.5,
        "accuracy": 0.5,
        "fossilized_accuracy": 0.5,
        "host_only_accuracy_before": 0.5,
        "host_only_accuracy": 0.5,
        "loss_before": 1.0,
        "loss": 1.0,
        "fossilized_loss": 1.0,
        "chance_loss": 2.3,
    }
    return HostStep(**usual | facts, slots=slots)


def reward_bound(config: RewardConfig, slots: int) -> float:
    """Return an upper bound of the absolute reward of one step, without the penalty of a rollback.

    In the modes `objective` and `kept` it holds if `objective.rent_cap` is at most 1, so that J lies in [-1, 1].
    """
    return sum(term_bounds(config, slots).values())


def term_bounds(config: RewardConfig, slots: int) -> dict[str, float]:
    """Return an upper bound of the absolute value of each term of the mode in one step."""
    shaping, bonus = config.shaping * 8.0 * slots, config.fossilize_bonus * slots
    bounds: dict[ModeName, dict[str, float]] = {
        "objective": {"objective": 2.0},
        "kept": {"kept": 2.0},
        "sparse": {"end": 1.0},
        "shaped": {
            "attribution": 200.0 * slots,
            "ransom": 0.3 * slots,
            "shaping": shaping,
            "rent": config.rent_cap,
            "warnings": 0.4 * slots,
            "op": 0.02,
            "auto_cull": 0.2 * slots,
            "end": 5.0,
        },
        "basic": {"shaping": shaping, "rent": config.rent_cap, "bonus": bonus, "end": 5.0},
        "basic_plus": {
            "shaping": shaping,
            "rent": config.rent_cap,
            "bonus": 0.3 * bonus,
            "drip": 0.1 * slots,
            "end": 5.0,
        },
        "escrow": {"credit": 100.0 * slots},
    }
    return bounds[config.mode]


def seed_life(advances: Sequence[bool], growth: float = 0.3, start: float = 0.5) -> list[tuple[str, SlotStep]]:
    """Return op and slot, tick by tick, of a seed that is germinated, advances at the end of the ticks in `advances`,
    and is culled; nothing depends on the seed."""
    ticks: list[tuple[str, SlotStep]] = []
    before, acted, op = EMPTY, SlotStatus(Stage.GERMINATED, 0, 0), "GERMINATE"
    account = SeedAccount(accuracy_at_germination=start)
    for age, advance in enumerate(advances, 1):
        stage = NEXT.get(acted.stage, acted.stage) if advance else acted.stage
        after = SlotStatus(stage, 0 if stage is not acted.stage else acted.ticks_in_stage + 1, age)
        ticks.append((op, slot_step(before, acted, after, account=account, growth=growth, alpha=0.5)))
        before = acted = after
        op = "WAIT"
    culled = SlotStatus(Stage.CULLED, 0, 0)
    ticks.append(("CULL", slot_step(before, culled, SlotStatus(Stage.EMBARGOED, 0, 0), account=account)))
    return ticks


shares = st.floats(0.0, 1.0)
points = st.floats(-100.0, 100.0)
losses = st.floats(0.0) | st.just(float("nan"))
seeds = st.builds(SlotStatus, st.sampled_from(Stage), st.integers(0, 200), st.integers(0, 200))
accounts = st.builds(SeedAccount, shares, st.integers(0, 200), st.floats(0.0, 100.0))
slots = st.builds(
    SlotStep,
    *(seeds, seeds, seeds, accounts, points, points),
    growth=st.floats(0.0, 1e6),
    alpha=shares,
    parameters=st.integers(0, 10**6),
)
arbitrary_ticks = st.builds(
    HostStep,
    op=st.sampled_from(["WAIT", "GERMINATE", "CULL", "FOSSILIZE", "ADVANCE", "SET_ALPHA"]),
    already_ended=st.booleans(),
    at_horizon=st.booleans(),
    diverged=st.booleans(),
    objective_before=st.floats(-1.0, 1.0),
    objective=st.floats(-1.0, 1.0),
    fossilized_objective_before=st.floats(-1.0, 1.0),
    fossilized_objective=st.floats(-1.0, 1.0),
    accuracy_at_start=shares,
    accuracy_before=shares,
    accuracy=shares,
    fossilized_accuracy=shares,
    host_only_accuracy_before=shares,
    host_only_accuracy=shares,
    loss_before=losses,
    loss=losses,
    fossilized_loss=losses,
    chance_loss=st.floats(0.1, 12.0),
    slots=st.lists(slots, max_size=3).map(tuple),
)
"""Strategy for arbitrary steps, including ones that no host can take."""
