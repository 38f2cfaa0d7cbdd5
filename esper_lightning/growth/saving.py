"""Saving of a grown network to a folder: slots and seeds in `topology.json`, a plain state dict in `weights.pt`."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import attach_from_records, attachment_records, detach_slots
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.manifest import SlotRecord, build_slot_records, install_slot_records, manifest
from esper_lightning.serialization.safe_load import read_tensors

FORMAT_VERSION = 1
"""Version of the file format; files of another version are refused."""

TOPOLOGY_FILE, WEIGHTS_FILE = "topology.json", "weights.pt"


def save(network: nn.Module, folder: str | Path) -> None:
    """Write a network to `folder`: `topology.json`, and `weights.pt`, readable by `torch.load(weights_only=True)`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    topology = {"format": FORMAT_VERSION, "attached": attachment_records(network), "slots": manifest(network)}
    replace_file(folder / WEIGHTS_FILE, lambda path: torch.save(network.state_dict(), path))
    replace_file(folder / TOPOLOGY_FILE, lambda path: path.write_text(json.dumps(topology, indent=1) + "\n"))


def load(network: nn.Module, folder: str | Path) -> None:
    """Load the grown network that `save` wrote into `network`, which has the same architecture before growth.

    Slots that were attached are attached again if the network lacks them. Raises ValueError, and leaves the network
    unchanged, if the files are missing, damaged, or of another network.
    """
    folder = Path(folder)
    for name in (TOPOLOGY_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}; name a folder that growth.save has written")
    topology = _read_topology(folder / TOPOLOGY_FILE)
    weights = _read_weights(folder / WEIGHTS_FILE, next(network.parameters(), torch.zeros(())).device)
    slots_before = set(slots_of(network))
    missing_records = [
        entry for entry in topology["attached"] if not isinstance(entry, dict) or entry.get("slot") not in slots_before
    ]
    try:
        attach_from_records(network, missing_records)
        records = build_slot_records(network, topology["slots"])
        _check_weights(network, records, weights, path=folder / WEIGHTS_FILE)
    except ValueError:
        detach_slots(network, set(slots_of(network)) - slots_before)
        raise
    install_slot_records(records)
    network.load_state_dict(weights)


def _read_topology(path: Path) -> dict[str, Any]:
    try:
        topology = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # not text, not JSON, or nested too deeply
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(topology, dict) or topology.get("format") != FORMAT_VERSION:
        raise ValueError(f"{path} is not of format {FORMAT_VERSION}; save the network again with this version")
    if not all(isinstance(topology.get(name), list) for name in ("attached", "slots")):
        raise ValueError(f"{path} is damaged: it lacks a list of attached places or of slots")
    return topology


def _read_weights(path: Path, device: torch.device) -> dict[str, Tensor]:
    weights = read_tensors(path, device)
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise ValueError(f"{path} holds no state dict; save the network again")
    return weights


def _check_weights(network: nn.Module, records: list[SlotRecord], weights: dict[str, Tensor], *, path: Path) -> None:
    """Raise ValueError unless `weights` fit the network with the planned content of its slots."""
    # A shared module has several names, and its weights appear under each.
    record_of_slot: dict[nn.Module, SlotRecord] = {record.slot: record for record in records}
    names = [
        (name, record_of_slot[m]) for name, m in network.named_modules(remove_duplicate=False) if m in record_of_slot
    ]
    slot_prefixes = tuple(f"{name}." for name, _ in names)
    expected = {
        name: _shape(value) for name, value in network.state_dict().items() if not name.startswith(slot_prefixes)
    }
    for name, record in names:
        for part, module in (("seed", record.seed), ("folded", record.folded or nn.Identity())):
            expected |= {f"{name}.{part}.{key}": _shape(value) for key, value in module.state_dict().items()}
    found = {name: _shape(value) for name, value in weights.items()}
    if found != expected:
        differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise ValueError(f"{path} is of another network: {differing[0]} and {len(differing) - 1} more do not fit")


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor; None for a module's extra state."""
    return tuple(value.shape) if isinstance(value, Tensor) else None


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file and rename it to `path`, so that a crash leaves the earlier file intact."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
