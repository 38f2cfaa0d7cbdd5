"""Manifest of a grown network in plain JSON types; with a state dict it restores the network exactly."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from esper_lightning.growth.alpha import Ramp, check_ramp
from esper_lightning.growth.blend import BlendStyle
from esper_lightning.growth.lifecycle import new_seed, seed_skeleton, slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import OCCUPIED, Stage

Manifest = list[dict[str, Any]]

MAX_TICKS = 2**53
"""Largest number of ticks, exact in floating point."""


def manifest(network: nn.Module) -> Manifest:
    """Return a manifest entry for each slot: its seed's stage, blueprint, style, ramp and ages, in plain JSON types."""
    return [
        {
            "slot": slot.name,
            "layout": slot.layout,
            "width": slot.width,
            "stage": slot.stage.name,
            "blueprint": slot.blueprint,
            "style": slot.style,
            "ramp": list(slot.ramp),
            "ramp_ticks": slot.ramp_ticks,
            "age": slot.age,
            "ticks_in_stage": slot.ticks_in_stage,
            "folded": None if slot.folded is None else slot.folded.kernel_size[0],
        }
        for slot in slots_of(network).values()
    ]


def rebuild(network: nn.Module, structure: Manifest) -> None:
    """Grow `network` as a manifest describes; its weights are then loaded with `load_state_dict`.

    Raises ValueError, and changes nothing, if the manifest has other slots than the network or an invalid entry.
    """
    install_slot_records(build_slot_records(network, structure))


class SlotRecord(NamedTuple):
    """A slot with the state and modules to be installed in it."""

    slot: SeedSlot
    entry: dict[str, Any]
    ramp: Ramp
    seed: nn.Module
    folded: nn.Conv2d | None


def build_slot_records(network: nn.Module, structure: Manifest) -> list[SlotRecord]:
    """Check a manifest and build the seeds that it describes, with random weights, without installing them."""
    return [_build_slot_record(slot, entry) for slot, entry in _pair_slots(network, structure)]


def current_slot_records(network: nn.Module) -> list[SlotRecord]:
    """Return records that install the present content of every slot again."""
    entries = zip(slots_of(network).values(), manifest(network), strict=True)
    return [SlotRecord(slot, entry, slot.ramp, slot.seed, slot.folded) for slot, entry in entries]


def slot_shapes(network: nn.Module, structure: Manifest) -> dict[SeedSlot, dict[str, torch.Size | None]]:
    """Return the shapes of each slot's state dict once it is rebuilt from a manifest, without memory for the weights.

    A module's extra state has the shape None. Raises ValueError if `rebuild` would refuse the manifest.
    """
    return {slot: _entry_shapes(slot, entry) for slot, entry in _pair_slots(network, structure)}


def _entry_shapes(slot: SeedSlot, entry: dict[str, Any]) -> dict[str, torch.Size | None]:
    _check_entry(slot, entry)
    content = nn.ModuleDict()
    try:
        if entry["blueprint"] is not None:
            content["seed"] = seed_skeleton(slot, entry["blueprint"], entry["style"])
        if entry["folded"] is not None:
            with torch.device("meta"):
                content["folded"] = nn.Conv2d(slot.width, slot.width, entry["folded"])
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:  # a width that the blueprint cannot have
        raise ValueError(f"slot {slot.name!r}: no {entry['blueprint']} of width {slot.width}: {error}") from None
    return shapes_of(content.state_dict())


def shapes_of(state: Mapping[str, Any]) -> dict[str, torch.Size | None]:
    """Return the shape of every tensor of a state dict by name; None for a module's extra state."""
    return {name: value.shape if isinstance(value, Tensor) else None for name, value in state.items()}


def _pair_slots(network: nn.Module, structure: Manifest) -> list[tuple[SeedSlot, dict[str, Any]]]:
    """Return each slot with its manifest entry. Raises ValueError unless the manifest has an entry for every slot."""
    slots = slots_of(network)
    if not isinstance(structure, list):
        raise ValueError(f"a manifest is a list with an entry per slot, got {type(structure).__name__}")
    for number, entry in enumerate(structure, 1):
        if not isinstance(entry, dict):
            raise ValueError(f"a manifest is a list of dicts, but entry {number} is a {type(entry).__name__}")
    slot_names = [entry.get("slot") for entry in structure]
    if slot_names != list(slots):
        saved, present = reprlib.repr(slot_names), reprlib.repr(list(slots))
        raise ValueError(f"the manifest is of a network with slots {saved}, this one has {present}")
    return [(slots[entry["slot"]], entry) for entry in structure]


def install_slot_records(records: list[SlotRecord]) -> None:
    """Install the records of `build_slot_records` in their slots."""
    for slot, entry, ramp, seed, folded in records:
        slot.empty()
        slot.stage = Stage[entry["stage"]]
        slot.blueprint, slot.style = entry["blueprint"], entry["style"]
        slot.ramp, slot.ramp_ticks = ramp, entry["ramp_ticks"]
        slot.age, slot.ticks_in_stage = entry["age"], entry["ticks_in_stage"]
        slot.seed, slot.folded = seed, folded
        slot.alpha.fill_(slot.alpha_now)


def _is_tick_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TICKS


ENTRY_CHECKS: dict[str, Callable[[Any], bool]] = {
    "stage": lambda value: isinstance(value, str) and value in Stage.__members__,
    "blueprint": lambda value: value is None or isinstance(value, str),
    "style": lambda value: value in get_args(BlendStyle),
    "ramp": lambda value: (
        isinstance(value, list)
        and len(value) == len(Ramp._fields)
        and all(type(number) in (int, float) for number in value[:2])
        and _is_tick_count(value[2])
        and isinstance(value[3], str)
    ),
    "ramp_ticks": _is_tick_count,
    "age": _is_tick_count,
    "ticks_in_stage": _is_tick_count,
    "folded": lambda value: value is None or (type(value) is int and value in (1, 3)),
}
"""Checks of type and range for the values of a manifest entry; layout and width are compared with the slot instead."""


def _check_entry(slot: SeedSlot, entry: dict[str, Any]) -> Ramp:
    """Return the ramp of a manifest entry. Raises ValueError unless every value is valid and fits the slot."""
    try:
        for name, is_valid in ENTRY_CHECKS.items():
            if name not in entry or not is_valid(entry[name]):
                raise ValueError(f"{name} is {reprlib.repr(entry.get(name, 'missing'))}")
        for name, expected in (("layout", slot.layout), ("width", slot.width)):
            if type(entry.get(name)) is not type(expected) or entry[name] != expected:
                raise ValueError(
                    f"{name} is {reprlib.repr(entry.get(name, 'missing'))}, the slot's is {reprlib.repr(expected)}"
                )
        if (Stage[entry["stage"]] in OCCUPIED) != (entry["blueprint"] is not None):
            raise ValueError(f"stage {entry['stage']} with blueprint {reprlib.repr(entry['blueprint'])}")
        if entry["folded"] is not None and slot.layout != "image":
            raise ValueError(f"folded is {entry['folded']!r}, which only image features can have")
        return check_ramp(Ramp(*entry["ramp"]))
    except ValueError as error:
        raise _damaged(slot, error) from None


def _build_slot_record(slot: SeedSlot, entry: dict[str, Any]) -> SlotRecord:
    ramp = _check_entry(slot, entry)
    seed: nn.Module = nn.Identity()
    if entry["blueprint"] is not None:
        # The drawn weights are overwritten by load_state_dict. Any blueprint supports birth "random".
        generator = torch.Generator(slot.alpha.device)
        try:
            seed = new_seed(slot, entry["blueprint"], entry["style"], generator=generator, birth="random")
        except ValueError as error:
            raise _damaged(slot, error) from None
    folded = None if entry["folded"] is None else slot.layer_for(entry["folded"])
    return SlotRecord(slot, entry, ramp, seed, folded)


def _damaged(slot: SeedSlot, error: ValueError) -> ValueError:
    return ValueError(f"slot {slot.name!r}: the manifest's entry is damaged or of another version: {error}")
