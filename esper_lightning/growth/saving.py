"""Saving of a grown network to a folder: slots and seeds in `topology.json`, a plain state dict in `weights.pt`."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import attach_known, attachments, detach_slots
from esper_lightning.growth.manifest import Place, install, manifest, plan
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.reading import read_tensors

FORMAT = 1
"""Version of the file format; files of another version are refused."""

TOPOLOGY, WEIGHTS = "topology.json", "weights.pt"


def save(network: nn.Module, folder: str | Path) -> None:
    """Write a grown network to `folder`: `topology.json`, and `weights.pt`, which `weights_only=True` loads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    topology = {"format": FORMAT, "attached": attachments(network), "slots": manifest(network)}
    replace_file(folder / WEIGHTS, lambda path: torch.save(network.state_dict(), path))
    replace_file(folder / TOPOLOGY, lambda path: path.write_text(json.dumps(topology, indent=1) + "\n"))


def load(network: nn.Module, folder: str | Path) -> None:
    """Load the grown network that `save` wrote into `network`, which has the same architecture before growth.

    Slots that were attached are attached again if the network lacks them. Raises ValueError, and leaves the network
    unchanged, if the files are missing, damaged, or of another network.
    """
    folder = Path(folder)
    for name in (TOPOLOGY, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}; name a folder that growth.save has written")
    topology = _read_topology(folder / TOPOLOGY)
    weights = _read_weights(folder / WEIGHTS, next(network.parameters(), torch.zeros(())).device)
    there = set(slots_of(network))
    missing = [entry for entry in topology["attached"] if not isinstance(entry, dict) or entry.get("slot") not in there]
    try:
        attach_known(network, missing)
        places = plan(network, topology["slots"])
        _check_weights(network, places, weights, folder / WEIGHTS)
    except ValueError:
        detach_slots(network, set(slots_of(network)) - there)
        raise
    install(places)
    network.load_state_dict(weights)


def _read_topology(path: Path) -> dict[str, Any]:
    try:
        topology = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # not text, not JSON, or nested too deeply
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(topology, dict) or topology.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}; save the network again with this version")
    if not all(isinstance(topology.get(name), list) for name in ("attached", "slots")):
        raise ValueError(f"{path} is damaged: it lacks a list of attached places or of slots")
    return topology


def _read_weights(path: Path, device: torch.device) -> dict[str, Tensor]:
    weights = read_tensors(path, device)
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise ValueError(f"{path} holds no state dict; save the network again")
    return weights


def _check_weights(network: nn.Module, places: list[Place], weights: dict[str, Tensor], path: Path) -> None:
    """Raise ValueError unless `weights` fit the network with the planned content of its slots."""
    # A shared module has several names, and its weights appear under each.
    planned = {place.slot: place for place in places}
    names = [(name, planned[m]) for name, m in network.named_modules(remove_duplicate=False) if m in planned]
    inside = tuple(f"{name}." for name, _ in names)
    expected = {name: _shape(value) for name, value in network.state_dict().items() if not name.startswith(inside)}
    for name, place in names:
        for part, module in (("seed", place.seed), ("folded", place.folded or nn.Identity())):
            expected |= {f"{name}.{part}.{key}": _shape(value) for key, value in module.state_dict().items()}
    found = {name: _shape(value) for name, value in weights.items()}
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise ValueError(f"{path} is of another network: {wrong[0]} and {len(wrong) - 1} more do not fit")


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor; None for a module's extra state."""
    return tuple(value.shape) if isinstance(value, Tensor) else None


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file and rename it to `path`, so that a crash leaves the earlier file intact."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
