"""Saving of a grown network to one safetensors file: its state dict, with slots and seeds as JSON in the metadata."""

import json
import reprlib
from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import attach_from_records, attachment_records, detach_slots
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.manifest import (
    build_contents,
    current_contents,
    install_contents,
    manifest,
    shapes_of,
    slot_shapes,
)
from esper_lightning.growth.recorded import weights_of, with_records_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.serialization.replace import replace_durably

FORMAT_VERSION = 2
"""Version of the file format; files of another version are refused."""

METADATA_KEY = "growth"
"""Key of the JSON text in the metadata of a file."""


def save(network: nn.Module, path: str | Path) -> None:
    """Write a network to one safetensors file, which replaces an earlier one atomically.

    Raises ValueError if `path` is a folder, or if a module has extra state, which is no tensor.
    """
    path, state = Path(path), weights_of(network)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file, such as {path / 'grown.safetensors'}")
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}; only networks whose state is tensors can be saved")
    growth = {"format": FORMAT_VERSION, "attached": attachment_records(network), "slots": manifest(network)}
    # Copies, because a file cannot hold tensors that share memory (tied weights).
    tensors = {name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    content = safetensors.torch.save(tensors, metadata={METADATA_KEY: json.dumps(growth)})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, lambda file: file.write(content))


def load(network: nn.Module, path: str | Path) -> None:
    """Load the grown network that `save` wrote into `network`, which has the same architecture before growth.

    Slots that were attached are attached again if the network lacks them. The file is compared with the network before
    memory is taken for its seeds.

    Raises ValueError if the file is missing, damaged, or of another network. After this or any other exception, also
    an interrupt, the network is unchanged.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}; name one that growth.save has written")
    try:
        with safetensors.safe_open(path, framework="pt") as file, ExitStack() as undo:
            growth = _parse_growth((file.metadata() or {}).get(METADATA_KEY, ""), path)
            slots_before = set(slots_of(network))
            undo.callback(lambda: detach_slots(network, set(slots_of(network)) - slots_before))
            attach_from_records(network, _missing_records(growth["attached"], slots_before))
            expected = _expected_shapes(network, growth["slots"])
            names = list(file.keys())
            _check_shapes(expected, {name: torch.Size(file.get_slice(name).get_shape()) for name in names}, path)
            weights = {name: file.get_tensor(name) for name in names}
            contents = build_contents(network, growth["slots"])
            earlier_contents, earlier_state = current_contents(network), deepcopy(network.state_dict())
            undo.callback(lambda: network.load_state_dict(earlier_state))
            undo.callback(install_contents, earlier_contents)  # called first
            install_contents(contents)
            _check_types(network, weights, path)
            network.load_state_dict(with_records_of(network, weights))
            undo.pop_all()
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None


def _parse_growth(text: str, path: Path) -> dict[str, Any]:
    try:
        growth = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
        raise ValueError(f"{path} holds no grown network: {error}") from None
    if not isinstance(growth, dict) or growth.get("format") != FORMAT_VERSION:
        raise ValueError(f"{path} is not of format {FORMAT_VERSION}; save the network again with this version")
    if not all(isinstance(growth.get(name), list) for name in ("attached", "slots")):
        raise ValueError(f"{path} is damaged: it lacks a list of attached places or of slots")
    if len(growth["attached"]) > len(growth["slots"]):
        raise ValueError(f"{path} is damaged: it attaches more slots than it has")
    return growth


def _missing_records(records: list[Any], existing: set[str]) -> list[Any]:
    """Return the records of slots that the network lacks, and those that are no records, which are refused later."""
    return [
        record
        for record in records
        if not (isinstance(record, dict) and isinstance(record.get("slot"), str) and record["slot"] in existing)
    ]


def _expected_shapes(network: nn.Module, structure: list[Any]) -> dict[str, torch.Size | None]:
    """Return the shapes of the network's state dict with the content of its slots that a manifest describes."""
    shapes_of_slot = slot_shapes(network, structure)
    # A shared module has several names, and its weights appear under each.
    slots = [
        (f"{name}.", shapes_of_slot[module])
        for name, module in network.named_modules(remove_duplicate=False)
        if isinstance(module, SeedSlot)
    ]
    prefixes = tuple(prefix for prefix, _ in slots)
    shapes = shapes_of(weights_of(network))
    expected = {name: shape for name, shape in shapes.items() if not name.startswith(prefixes)}
    for prefix, content in slots:
        expected |= {f"{prefix}{name}": shape for name, shape in content.items()}
    return expected


def _check_shapes(expected: dict[str, torch.Size | None], found: dict[str, torch.Size], path: Path) -> None:
    if found != expected:
        differing = [name for name in expected | found if _shape_of(found, name) != _shape_of(expected, name)]
        first, more = differing[0], len(differing) - 1
        raise ValueError(
            f"{path} is of another network: {reprlib.repr(first)} is {_shape_of(found, first)} in the file and "
            f"{_shape_of(expected, first)} in the network" + (f"; {more} more differ" if more else "")
        )


def _shape_of(shapes: Mapping[str, torch.Size | None], name: str) -> str:
    """Return in words which shape a tensor has."""
    if name not in shapes:
        return "missing"
    shape = shapes[name]
    return "no tensor" if shape is None else str(list(shape))


def _check_types(network: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Raise ValueError if loading would drop a part of the saved numbers: fractions, or imaginary parts."""
    for name, value in weights_of(network).items():
        if not torch.can_cast(weights[name].dtype, value.dtype):
            raise ValueError(f"{path} is of another network: {name} is {weights[name].dtype}, not {value.dtype}")
