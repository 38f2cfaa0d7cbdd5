"""Manifest of a grown network in plain JSON types; with a state dict it restores the network exactly."""

import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import SeedSlot, SlotContent

Manifest = list[dict[str, Any]]

SlotContents = list[tuple[SeedSlot, SlotContent]]
"""Slots with what is to be installed in them."""


def manifest(network: nn.Module) -> Manifest:
    """Return a manifest entry for each slot: its seed's stage, blueprint, style, ramp and ages, in plain JSON types."""
    return [slot.entry() for slot in slots_of(network).values()]


def rebuild(network: nn.Module, structure: Manifest) -> None:
    """Grow `network` as a manifest describes; its weights are then loaded with `load_state_dict`.

    Raises ValueError, and changes nothing, if the manifest has other slots than the network or an invalid entry.
    """
    install_contents(build_contents(network, structure))


def build_contents(network: nn.Module, structure: Manifest) -> SlotContents:
    """Check a manifest and build the seeds that it describes, with random weights, without installing them."""
    return [(slot, slot.build_content(entry)) for slot, entry in _pair_slots(network, structure)]


def current_contents(network: nn.Module) -> SlotContents:
    """Return what installs the present content of every slot again."""
    return [(slot, slot.content()) for slot in slots_of(network).values()]


def install_contents(contents: SlotContents) -> None:
    """Install what `build_contents` or `current_contents` returned."""
    for slot, content in contents:
        slot.install(content)


def slot_shapes(network: nn.Module, structure: Manifest) -> dict[SeedSlot, dict[str, torch.Size | None]]:
    """Return the shapes of each slot's weights once it is rebuilt from a manifest, without memory for the weights.

    A module's extra state has the shape None. Raises ValueError if `rebuild` would refuse the manifest.
    """
    return {slot: shapes_of(slot.expected_state(entry)) for slot, entry in _pair_slots(network, structure)}


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
