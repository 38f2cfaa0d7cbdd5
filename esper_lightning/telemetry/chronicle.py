"""Turns what the pool says of a tick into events. Hosts are known by their place, seeds by their slot."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from esper_lightning.growth.restoring import check_count
from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.events import Contributed, Event, GateRefused, RolledBack, SeedChanged, Vetoed

if TYPE_CHECKING:
    from esper_lightning.envs import StepResult
    from esper_lightning.envs.host_env import HostEnv
    from esper_lightning.growth.growing import Refusals

NEXT = {Stage.TRAINING: Stage.BLENDING, Stage.PROBATIONARY: Stage.FOSSILIZED}
"""Where a gate may keep a seed from going on although its time has come, and what it is kept from."""


def rollbacks(step: "StepResult", tick: int) -> list[Event]:
    """Of one tick."""
    words = (word for word in step.verdicts if word.verdict.diverged)
    return [
        RolledBack(tick, word.host, word.seed, word.verdict.decision.value, word.verdict.cause, word.restored)
        for word in words
    ]


def vetoes(step: "StepResult", tick: int) -> list[Event]:
    """Of one tick."""
    return [Vetoed(tick, veto.host, veto.action, veto.reasons) for veto in step.vetoes]


def seed_changes(step: "StepResult", tick: int) -> list[Event]:
    """Of one tick."""
    return [
        SeedChanged(
            *(tick, host, seed.slot, seed.blueprint, seed.before.name, seed.after.name, seed.cause),
            *(seed.age, seed.contribution),
        )
        for host, _, seed in step.events
    ]


def contributions(envs: Sequence["HostEnv"], tick: int) -> list[Event]:
    """One event for all seeds of a tick; none where nothing is blended."""
    rows = [
        (host, slot.name, record.contribution)
        for host, env in enumerate(envs)
        if not env.ended
        for slot, record in zip(env.slots, env.records, strict=True)
        if slot.blended and record.contribution is not None
    ]
    return [Contributed(tick, *map(list, zip(*rows, strict=True)))] if rows else []


class GateWatch:
    """Says when a gate refuses a seed whose time has come: once, until the seed is somewhere else or the gate opens."""

    def __init__(self) -> None:
        self.refused: dict[tuple[int, str], str] = {}  # host, slot -> the stage that its seed is kept from

    def tick(self, step: "StepResult", envs: Sequence["HostEnv"], tick: int) -> list[Event]:
        """Takes in what followed from a step of `envs`; `tick` counts since the run began."""
        now = {
            (host, slot.name): (slot.blueprint, NEXT[slot.stage].name, reasons)
            for host, (env, refusals) in enumerate(zip(envs, step.refusals, strict=True))
            if not env.ended
            for slot, reasons in against(env, refusals)
        }
        news: list[Event] = [
            GateRefused(tick, *place, *what)
            for place, what in now.items()
            if self.refused.get(place) != what[1] or envs[0].tick == 1  # another episode
        ]
        self.refused = {place: stage for place, (_, stage, _) in now.items()}
        return news

    def state_dict(self) -> list[list[Any]]:
        return [[*place, stage] for place, stage in self.refused.items()]

    def load_state_dict(self, state: Any) -> None:
        """Raises ValueError if the state is damaged."""
        what = "what is known of gates"
        if not isinstance(state, list) or not all(isinstance(row, list) and len(row) == 3 for row in state):
            raise ValueError(f"{what} is no list of hosts, slots and stages")
        self.refused = {(check_count(what, host), str(slot)): str(stage) for host, slot, stage in state}


def against(env: "HostEnv", refusals: Sequence["Refusals"]) -> Iterator[tuple[Any, list[str]]]:
    """Slots whose seed a gate refuses although it has been long enough where it is, with the reasons."""
    least = env.lifecycle.training_ticks
    for slot, refused in zip(env.slots, refusals, strict=True):
        if slot.stage is Stage.TRAINING and slot.ticks_in_stage >= least:
            reasons = refused.advancing
        elif slot.stage is Stage.PROBATIONARY and not slot.fading and slot.alpha_before == slot.ramp.target:
            reasons = refused.fossilizing
        else:
            continue
        if reasons:
            yield slot, reasons
