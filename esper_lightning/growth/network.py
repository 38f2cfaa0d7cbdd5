"""Operations on one slot of a growing network. They change a stage, return what happened, and log nothing.

`growth.growing.GrowingNetwork` puts them together with an optimizer, measurements and gates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import nn

from esper_lightning.blueprints import Birth, build_on, build_seed, nearest
from esper_lightning.growth.alpha import Curve, Ramp, check_ramp
from esper_lightning.growth.blend import GatedSeed, SampleGate, Style
from esper_lightning.growth.gates import (
    Evidence,
    LifecycleConfig,
    against_blending,
    against_probation,
    against_training,
    reasons_to_cull,
)
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage, check_transition


@dataclass(frozen=True)
class SeedEvent:
    """One change of a seed: of its stage, or of where its alpha goes (then `before` and `after` are the same).

    Equal are those that tell of the same change, whatever had been measured by then.
    """

    slot: str
    blueprint: str
    before: Stage
    after: Stage
    cause: str
    ticks: int = field(default=0, compare=False)
    """Host epochs that the seed had spent in `before`."""
    age: int = field(default=0, compare=False)
    """Host epochs since it was germinated."""
    contribution: float | None = field(default=None, compare=False)
    """Accuracy points (of 100) as last measured at the alpha that it was meant to have. None: never, or alpha falls."""

    def __str__(self) -> str:
        """`layer1: conv_light DORMANT → GERMINATED (germinate)`"""
        change = self.before.name if self.before is self.after else f"{self.before.name} → {self.after.name}"
        return f"{self.slot}: {self.blueprint} {change} ({self.cause})"


def slots_of(network: nn.Module) -> dict[str, SeedSlot]:
    """The network's slots by name, in the order in which its modules were defined; names must differ."""
    slots = [module for module in network.modules() if isinstance(module, SeedSlot)]
    names = [slot.name for slot in slots]
    check_slot_names(names, names)
    return dict(zip(names, slots, strict=True))


def check_slot_names(wanted: Sequence[str], available: Iterable[str]) -> None:
    """Raises ValueError if a wanted slot does not exist or is named twice."""
    available = list(available)
    for name in wanted:
        if name not in available:
            raise ValueError(f"unknown slot {name!r}; {nearest(name, available)}")
        if list(wanted).count(name) > 1:
            raise ValueError(f"slot {name!r} is named twice; name each slot once")


def new_seed(
    slot: SeedSlot, blueprint: str, style: Style, generator: torch.Generator, birth: Birth = "identity"
) -> nn.Module:
    """A seed for `slot`, with its device, precision and mode; weights come from `generator`, on the same device."""
    device = slot.alpha.device
    seed = build_seed(blueprint, slot.layout, slot.width, device, generator, birth)
    if style == "gate":
        channels = -1 if slot.layout == "sequence" else 1
        seed = GatedSeed(seed, build_on(device, lambda: SampleGate(slot.width, channels), generator))
    return seed.to(slot.alpha.dtype).train(slot.training)


def germinate(
    slot: SeedSlot,
    blueprint: str,
    ramp: Ramp,
    generator: torch.Generator,
    style: Style = "add",
    birth: Birth = "identity",
) -> SeedEvent:
    """Puts a new seed in an empty slot. Its weights come from `generator`, which lives on the slot's device.

    The seed learns once an optimizer knows its parameters: see `growth.optimizer.add_group`, and `remove_group` for
    when it is culled.
    """
    check_transition(slot.name, slot.stage, Stage.GERMINATED)
    check_ramp(ramp)
    if style not in get_args(Style):
        raise ValueError(f"unknown style {style!r}; {nearest(style, get_args(Style))}")
    slot.seed = new_seed(slot, blueprint, style, generator, birth)  # may fail, and then the slot is as it was
    slot.blueprint, slot.style, slot.age = blueprint, style, 0
    slot.aim(ramp)
    return _move(slot, Stage.GERMINATED, "germinate")


def fossilize(slot: SeedSlot) -> SeedEvent:
    """Keeps the seed for good."""
    return _move(slot, Stage.FOSSILIZED, "fossilize")


def cull(slot: SeedSlot, cause: str = "cull") -> SeedEvent:
    """Removes the seed; its parameters are gone at once, and the slot stays closed for a while."""
    event = _move(slot, Stage.CULLED, cause)
    slot.empty()
    slot.stage = Stage.CULLED
    return event


def aim(slot: SeedSlot, target: float, ticks: int, curve: Curve) -> SeedEvent:
    """Sends alpha to another target over `ticks` host epochs. At target 0 the seed will be culled: a slow cull.

    Raises ValueError if alpha cannot move: before BLENDING, and once the seed is fossilized.
    """
    if not slot.ramping:
        raise ValueError(f"slot {slot.name!r}: alpha does not move in {slot.stage.name}; only BLENDING to PROBATIONARY")
    # From what the host has seen last: asked twice between two host epochs, alpha moves once.
    slot.aim(check_ramp(Ramp(slot.alpha_before, target, ticks, curve)))
    slot.ticks_in_stage = 0  # a seed that is given another alpha is judged anew
    return SeedEvent(
        slot.name, slot.blueprint, slot.stage, slot.stage, f"alpha to {target:g} in {ticks} ticks", age=slot.age
    )


def advance(slot: SeedSlot, cause: str = "advance") -> SeedEvent:
    """The next stage on the way to PROBATIONARY. Raises ValueError where only time or another operation leads on."""
    following = {Stage.TRAINING: Stage.BLENDING, Stage.BLENDING: Stage.PROBATIONARY}
    if slot.stage not in following:
        raise ValueError(f"slot {slot.name!r}: nothing to advance in {slot.stage.name}; only TRAINING and BLENDING")
    if slot.fading:
        raise ValueError(f"slot {slot.name!r}: the seed is being culled and cannot advance; set_alpha calls it back")
    return _move(slot, following[slot.stage], cause)


def elapse(slot: SeedSlot, evidence: Evidence, config: LifecycleConfig, horizon: int) -> list[SeedEvent]:
    """What time and evidence alone bring about at the end of a host epoch; `horizon` is the episode's length in ticks.

    Call it after `slot.tick()`. A seed may pass several stages at once where the config asks for no wait between them.
    """
    events: list[SeedEvent] = []
    if slot.stage is Stage.GERMINATED and not against_training(evidence):
        events.append(_move(slot, Stage.TRAINING, "placed"))
        evidence = evidence._replace(ticks_in_stage=0)
    if slot.stage is Stage.TRAINING and config.auto_blend and not against_blending(evidence, config):
        events.append(advance(slot, "ready to blend"))
    elif slot.fading:
        if slot.alpha_now == 0.0:
            events.append(cull(slot, "faded out"))
    elif slot.stage is Stage.BLENDING and config.auto_probation and not against_probation(evidence, config):
        events.append(advance(slot, "alpha reached its target"))
    elif (
        slot.stage is Stage.PROBATIONARY
        and evidence.alpha_rests
        and (why := reasons_to_cull(evidence, config, horizon))
    ):
        events.append(cull(slot, "; ".join(why)))
    elif slot.stage is Stage.CULLED:
        events.append(_move(slot, Stage.EMBARGOED, "removed"))
    if slot.stage is Stage.EMBARGOED and slot.ticks_in_stage >= config.embargo_ticks:
        events.append(_move(slot, Stage.DORMANT, "embargo over"))
        slot.empty()
    return events


def _move(slot: SeedSlot, stage: Stage, cause: str) -> SeedEvent:
    before, ticks = slot.stage, slot.ticks_in_stage
    slot.move_to(stage)
    return SeedEvent(slot.name, slot.blueprint or "", before, stage, cause, ticks, slot.age)


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
