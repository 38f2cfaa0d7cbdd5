"""Lifecycle operations on one slot, which return an event. `GrowingNetwork` adds optimizer, measurements and gates."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from esper_lightning.growth import gates
from esper_lightning.growth.blend import Ramp, check_ramp
from esper_lightning.growth.blueprints import Birth, suggest_name
from esper_lightning.growth.gates import Evidence, LifecycleConfig
from esper_lightning.growth.slot import SeedSlot, new_seed
from esper_lightning.growth.stages import STAGES_TO_FOSSILIZED, Stage, check_transition


class SeedEvent(NamedTuple):
    """One change of a seed's stage, or a report that it is stuck: then `before` and `after` are equal."""

    slot: str
    blueprint: str  # name of the seed's blueprint; empty for a change of a slot whose seed has been removed
    before: Stage
    after: Stage
    cause: str
    age: int = 0  # host epochs since germination
    contribution: float | None = None  # last measured contribution, in points (of 100). None: never measured
    host: int = 0  # number of the host in its pool
    tick: int = 0  # host epoch of the change: from 1 in the episode, in `events.jsonl` since the run began; 0: unknown

    def __str__(self) -> str:
        """Return a line like `layer1: conv_light DORMANT → GERMINATED (germinate)`."""
        change = self.before.name if self.before is self.after else f"{self.before.name} → {self.after.name}"
        return f"{self.slot}: {self.blueprint} {change} ({self.cause})"


def slots_of(network: nn.Module) -> dict[str, SeedSlot]:
    """Return the network's slots by name, in the order of module definition. Raises ValueError if names repeat."""
    slots = [module for module in network.modules() if isinstance(module, SeedSlot)]
    names = [slot.name for slot in slots]
    check_slot_names(names, names)  # finds names that occur twice
    return dict(zip(names, slots, strict=True))


def check_slot_names(wanted: Sequence[str], available: Iterable[str]) -> None:
    """Raise ValueError if a wanted slot does not exist or is named twice."""
    available, counts = list(available), Counter(wanted)
    for name in wanted:
        if name not in available:
            raise ValueError(f"unknown slot {name!r}; {suggest_name(name, available)}")
        if counts[name] > 1:
            raise ValueError(f"slot {name!r} is named twice; name each slot once")


def germinate(
    slot: SeedSlot,
    blueprint: str,
    ramp: Ramp = Ramp(),
    *,
    generator: torch.Generator,
    birth: Birth = "identity",
    optimizers: Sequence[Optimizer] = (),
) -> SeedEvent:
    """Put a new seed in an empty slot, with weights drawn from `generator`, which must be on the slot's device.

    Copies of blocks, in a depth slot, join `optimizers` and are fossilized at once, without a blend.

    The seed learns only once an optimizer holds its parameters: see `add_group`, and `remove_group` for its cull.
    """
    check_transition(slot.name, slot.stage, Stage.GERMINATED)
    check_ramp(ramp)
    slot.deepen(blueprint, optimizers)  # if this fails, the slot is unchanged
    slot.seed = new_seed(slot, blueprint, generator=generator, birth=birth)
    slot.blueprint, slot.age = blueprint, 0
    slot.start_ramp(ramp)
    event = move(slot, Stage.GERMINATED, "germinate")
    if not slot.is_judged:
        for stage in STAGES_TO_FOSSILIZED:
            slot.move_to(stage)
        event = event._replace(after=slot.stage)
    return event


def cull(slot: SeedSlot, cause: str = "cull") -> SeedEvent:
    """Remove the seed with its parameters; the slot then stays closed for the embargo."""
    event = move(slot, Stage.CULLED, cause)
    slot.empty()
    slot.stage = Stage.CULLED
    return event


def move(slot: SeedSlot, stage: Stage, cause: str) -> SeedEvent:
    """Move the slot to `stage` and return the event, with the stage from before the move."""
    event = unchanged_stage(slot, cause)._replace(after=stage)
    slot.move_to(stage)
    return event


def unchanged_stage(slot: SeedSlot, cause: str) -> SeedEvent:
    """Return an event of the seed in `slot` that leaves its stage as it is."""
    return SeedEvent(slot.name, slot.blueprint or "", before=slot.stage, after=slot.stage, cause=cause, age=slot.age)


def auto_transition(
    slot: SeedSlot, evidence: Evidence, config: LifecycleConfig, *, horizon: int, hold: bool = False
) -> list[SeedEvent]:
    """Apply the automatic changes of stage at the end of a host epoch; `horizon` is the episode length in host epochs.

    Call it after `slot.end_epoch()`. A seed may pass several stages at once if the config sets no wait between them.
    With `hold` no seed is advanced to BLENDING or PROBATIONARY.
    """
    events: list[SeedEvent] = []
    if slot.stage is Stage.GERMINATED and not gates.reasons_against_training(evidence):
        events.append(move(slot, Stage.TRAINING, "placed"))
        evidence = evidence._replace(ticks_in_stage=0)
    if slot.stage is Stage.TRAINING and not hold and not gates.reasons_against_blending(evidence, config):
        events.append(move(slot, Stage.BLENDING, "ready to blend"))
    elif slot.stage is Stage.TRAINING and (reasons := gates.reasons_it_is_stuck(evidence, config)):
        events.append(unchanged_stage(slot, f"stuck: {'; '.join(reasons)}"))
    elif slot.stage is Stage.BLENDING and not hold and not gates.reasons_against_probation(evidence):
        events.append(move(slot, Stage.PROBATIONARY, "alpha reached its target"))
    elif slot.stage is Stage.PROBATIONARY and (reasons := gates.reasons_to_cull(evidence, config, horizon)):
        events.append(cull(slot, "; ".join(reasons)))
    elif slot.stage is Stage.CULLED:
        events.append(move(slot, Stage.EMBARGOED, "removed"))
    if slot.stage is Stage.EMBARGOED and slot.ticks_in_stage >= config.embargo_ticks:
        events.append(move(slot, Stage.DORMANT, "embargo over"))
        slot.empty()
    return events


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
