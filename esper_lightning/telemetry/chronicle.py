"""Events of one environment step, derived from the pool's result. Hosts are named by index, seeds by slot."""

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
"""Stages that a gate guards the exit of, and the stage that follows each."""


def rollbacks(step: "StepResult", tick: int) -> list[Event]:
    """Return one event for each host that the Governor rolled back or gave up in this step."""
    words = (word for word in step.verdicts if word.verdict.diverged)
    return [
        RolledBack(tick, word.host, word.seed, word.verdict.decision.value, word.verdict.cause, word.restored)
        for word in words
    ]


def vetoes(step: "StepResult", tick: int) -> list[Event]:
    """Return one event for each action that the Governor refused in this step."""
    return [Vetoed(tick, veto.host, veto.action, veto.reasons) for veto in step.vetoes]


def seed_changes(step: "StepResult", tick: int) -> list[Event]:
    """Return one event for each change of a seed's stage, or of its alpha's target, in this step."""
    return [
        SeedChanged(
            *(tick, host, seed.slot, seed.blueprint, seed.before.name, seed.after.name, seed.cause),
            *(seed.age, seed.contribution),
        )
        for host, _, seed in step.events
    ]


def contributions(envs: Sequence["HostEnv"], tick: int) -> list[Event]:
    """Return one event with the contributions of all blended seeds; no event if there are none."""
    rows = [
        (host, slot.name, record.contribution)
        for host, env in enumerate(envs)
        if not env.ended
        for slot, record in zip(env.slots, env.records, strict=True)
        if slot.blended and record.contribution is not None
    ]
    return [Contributed(tick, *map(list, zip(*rows, strict=True)))] if rows else []


class GateWatch:
    """Reports gates that refuse a seed whose minimum time in its stage is over: once per seed and stage."""

    def __init__(self) -> None:
        self.refused: dict[tuple[int, str], str] = {}  # host, slot -> the stage that its seed is kept from

    def tick(self, step: "StepResult", envs: Sequence["HostEnv"], tick: int) -> list[Event]:
        """Process one step of `envs` and return new refusals; `tick` counts steps since the run began.

        A refusal is reported again only after the seed has changed its stage or the gate has opened in between.
        """
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
        """Restore the state. Raises ValueError if it is damaged."""
        what = "what is known of gates"
        if not isinstance(state, list) or not all(isinstance(row, list) and len(row) == 3 for row in state):
            raise ValueError(f"{what} is no list of hosts, slots and stages")
        self.refused = {(check_count(what, host), str(slot)): str(stage) for host, slot, stage in state}


def against(env: "HostEnv", refusals: Sequence["Refusals"]) -> Iterator[tuple[Any, list[str]]]:
    """Yield each slot whose seed a gate refuses although its minimum time in the stage is over, with the reasons."""
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
