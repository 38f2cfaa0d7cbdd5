"""Operations on a growing network: any module that holds SeedSlots. They return what happened and log nothing."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from esper_lightning.blueprints import build_seed
from esper_lightning.growth.alpha import Ramp
from esper_lightning.growth.gates import (
    Evidence,
    LifecycleConfig,
    gate_blending,
    gate_fossil,
    gate_probation,
    reasons_to_cull,
)
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage, check_transition


class SeedEvent(NamedTuple):
    """One change of stage."""

    slot: str
    blueprint: str
    before: Stage
    after: Stage
    cause: str


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
            near = difflib.get_close_matches(name, available, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(available)}"
            raise ValueError(f"unknown slot {name!r}; {hint}")
        if list(wanted).count(name) > 1:
            raise ValueError(f"slot {name!r} is named twice; name each slot once")


def germinate(slot: SeedSlot, blueprint: str, ramp: Ramp, generator: torch.Generator) -> SeedEvent:
    """Puts a new seed in an empty slot. Its weights come from `generator`, which lives on the slot's device.

    The seed learns once an optimizer knows its parameters: see `growth.optimizer.add_group`, and `remove_group` for
    when it is culled.
    """
    check_transition(slot.name, slot.stage, Stage.GERMINATED)
    slot.seed = _new_seed(slot, blueprint, generator)  # may fail, and then the slot is as it was
    slot.blueprint, slot.ramp, slot.age = blueprint, ramp, 0
    return _move(slot, Stage.GERMINATED, "germinate")


def _new_seed(slot: SeedSlot, blueprint: str, generator: torch.Generator) -> nn.Module:
    """A seed with the slot's device, precision and mode."""
    seed = build_seed(blueprint, slot.layout, slot.width, slot.alpha.device, generator)
    return seed.to(slot.alpha.dtype).train(slot.training)


def fossilize(slot: SeedSlot) -> SeedEvent:
    """Keeps the seed for good."""
    return _move(slot, Stage.FOSSILIZED, "fossilize")


def cull(slot: SeedSlot, cause: str = "cull") -> SeedEvent:
    """Removes the seed; its parameters are gone at once, and the slot stays closed for a while."""
    event = _move(slot, Stage.CULLED, cause)
    slot.empty()
    slot.stage = Stage.CULLED
    return event


def advance(slot: SeedSlot, evidence: Evidence, config: LifecycleConfig, horizon: int) -> list[SeedEvent]:
    """What time and evidence alone bring about at the end of a host epoch; `horizon` is the episode's length in ticks.

    Call it after `slot.tick()`. A seed may pass several stages at once where the config asks for no wait between them.
    """
    events: list[SeedEvent] = []
    if slot.stage is Stage.GERMINATED:
        events.append(_move(slot, Stage.TRAINING, "placed"))
        evidence = evidence._replace(ticks_in_stage=0)
    if slot.stage is Stage.TRAINING and not gate_blending(evidence, config):
        events.append(_move(slot, Stage.BLENDING, "ready to blend"))
    elif slot.stage is Stage.BLENDING and not gate_probation(evidence, config):
        events.append(_move(slot, Stage.PROBATIONARY, "alpha reached its target"))
    elif slot.stage is Stage.PROBATIONARY and (why := reasons_to_cull(evidence, config, horizon)):
        events.append(cull(slot, "; ".join(why)))
    elif slot.stage is Stage.CULLED:
        events.append(_move(slot, Stage.EMBARGOED, "removed"))
    if slot.stage is Stage.EMBARGOED and slot.ticks_in_stage >= config.embargo_ticks:
        events.append(_move(slot, Stage.DORMANT, "embargo over"))
        slot.empty()
    return events


def may_cull(slot: SeedSlot, config: LifecycleConfig) -> bool:
    return slot.live and slot.age >= config.min_cull_age


def may_fossilize(slot: SeedSlot, evidence: Evidence, config: LifecycleConfig) -> bool:
    return slot.stage is Stage.PROBATIONARY and not gate_fossil(evidence, config)


def _move(slot: SeedSlot, stage: Stage, cause: str) -> SeedEvent:
    before = slot.stage
    slot.move_to(stage)
    return SeedEvent(slot.name, slot.blueprint or "", before, stage, cause)


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def manifest(network: nn.Module) -> list[dict[str, Any]]:
    """What has grown where, as plain JSON: with the state dict it rebuilds the network exactly."""
    return [
        {
            "slot": slot.name,
            "stage": slot.stage.name,
            "blueprint": slot.blueprint,
            "ramp": list(slot.ramp),
            "age": slot.age,
            "ticks_in_stage": slot.ticks_in_stage,
        }
        for slot in slots_of(network).values()
    ]


def rebuild(network: nn.Module, structure: list[dict[str, Any]]) -> None:
    """Gives `network` the grown structure of a manifest; its weights are then loaded with `load_state_dict`.

    Raises ValueError if the manifest's slots are not the network's.
    """
    slots = slots_of(network)
    named = [entry["slot"] for entry in structure]
    if named != list(slots):
        raise ValueError(f"the manifest is of a network with slots {named}, this one has {list(slots)}")
    for entry in structure:
        slot = slots[entry["slot"]]
        slot.empty()
        slot.stage = Stage[entry["stage"]]
        slot.blueprint = entry["blueprint"]
        slot.ramp = Ramp(*entry["ramp"])
        slot.age, slot.ticks_in_stage = entry["age"], entry["ticks_in_stage"]
        slot.alpha.fill_(slot.alpha_now)
        if slot.occupied:
            # Any generator will do: the weights are loaded over it.
            slot.seed = _new_seed(slot, slot.blueprint, torch.Generator(slot.alpha.device))
