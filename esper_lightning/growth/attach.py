"""Slots for any network: forward hooks insert them after modules that were not written for growth."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from esper_lightning.growth.nested import pick, put, tensors
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.running import Example, evaluating, run
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.survey import (
    LAYOUTS,
    REFUSALS,
    Place,
    check_batch_axis,
    check_module,
    check_names,
    doubled,
    dry_run,
)

CONTAINER = "grown_slots"
"""Name of the child module that holds the attached slots; the prefix of their keys in the state dict."""


class AttachedSlots(nn.ModuleDict):
    """Container of the attached slots. As a layer it is the identity, because the network may be an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, Place] = {}
        self.handles: dict[str, RemovableHandle] = {}

    def forward(self, x: Any) -> Any:
        return x


class _Grow:
    """Forward hook that passes one tensor of a module's output through a slot.

    It is an object and not a closure, so that a deep copy of the network uses its own copies of the slots.
    """

    def __init__(self, slot: SeedSlot, place: Place) -> None:
        self.slot = slot
        self.place = place

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        feature, moved = pick(output, self.place.path), self.place.channels_last
        grown = self.slot(feature.movedim(-1, 1)).movedim(1, -1) if moved else self.slot(feature)
        return put(output, self.place.path, grown)


def attach_slots(
    network: nn.Module,
    names: Sequence[str],
    example_input: Example,
    isolate: bool | None = None,
    channels_last: Sequence[str] = (),
) -> dict[str, SeedSlot]:
    """Attach a slot after each named module of `network`, in place. Empty slots leave the outputs unchanged.

    Args:
        network: Any module. Its weights are unchanged; it gets one more child that holds the slots.
        names: Dotted names of modules, as in `named_modules`. If a module returns several tensors, the slot takes the
            first one, or the one selected by indices or keys in brackets: `lstm[0]`, `encoder[features]`.
        example_input: Batch of at least two samples; a tuple holds positional, a dict keyword arguments. Forward passes
            on it in evaluation mode determine layout and width at each slot, and whether a shortcut bypasses it.
        detach_input: See SeedSlot.
        channels_last: Subset of `names` whose features are [B, H, W, C] (as in a Swin transformer); the shape alone
            does not reveal it.

    Returns:
        All slots of the network by name; new slots come last, in the order in which data passes through them.

    Raises:
        ValueError: A name is unknown or given twice; a module does not run, or does not return features [B, C, H, W],
            [B, T, C] or [B, C]; the example has only one sample. The network is then unchanged.
    """
    if hasattr(network, "_orig_mod"):
        raise ValueError("the network is compiled, and would not see its slots; attach them first, compile then")
    wanted = check_names(network, names, channels_last)
    with evaluating(network), torch.no_grad(), ExitStack() as undo:
        found, outputs = dry_run(network, wanted, example_input)
        check_batch_axis(network, wanted, found, example_input)
        attached: list[str] = []
        undo.callback(detach_slots, network, attached)
        for name, (place, feature) in found.items():
            layout, axis = LAYOUTS[feature.ndim]
            width = feature.shape[-1 if place.channels_last else axis]
            slot = SeedSlot(name, layout, width, isolate)
            _attach(network, place, slot.to(feature.device, feature.dtype))
            attached.append(name)
        for name in found:
            slot = slots_of(network)[name]
            slot.trunk = _is_trunk(network, slot, example_input, outputs)
        undo.pop_all()
    return slots_of(network)


def detach_slots(network: nn.Module, names: Iterable[str] | None = None) -> None:
    """Remove attached slots with everything grown in them; the state dict has its earlier keys again.

    Args:
        names: Slots to remove. None: all of them; raises ValueError if there are none.
    """
    container = _container(network)
    if container is None and names is None:
        raise ValueError("the network has no attached slots; there is nothing to detach")
    for name in list(container.places) if names is None else names:
        container.handles.pop(name).remove()
        del container.places[name], container[_key(name)]
    if container is not None and not container.places:
        delattr(network, CONTAINER)


def _key(name: str) -> str:
    # Module names must not contain dots or equal an attribute of nn.ModuleDict (`keys`, `values`).
    return f"at/{name.replace('.', '/')}"


def attachments(network: nn.Module) -> list[dict[str, Any]]:
    """Return where and how each slot was attached, in plain JSON types."""
    container = _container(network)
    if container is None:
        return []
    slots = slots_of(network)
    return [
        {
            "slot": name,
            "module": place.module,
            "path": list(place.path),
            "channels_last": place.channels_last,
            "layout": slots[name].layout,
            "width": slots[name].width,
            "isolate": slots[name].isolate,
            "trunk": slots[name].trunk,
        }
        for name, place in container.places.items()
    ]


def attach_known(network: nn.Module, known: Sequence[Mapping[str, Any]]) -> None:
    """Attach slots from the records that `attachment_records` returned for an equal network; needs no example."""
    some = next(network.parameters(), torch.zeros(()))
    modules = dict(network.named_modules())
    for entry in known:
        _check_known(entry)
        check_module(entry["module"], list(modules))
        slot = SeedSlot(entry["slot"], entry["layout"], entry["width"], entry["isolate"], entry["trunk"])
        place = Place(entry["module"], tuple(entry["path"]), entry["channels_last"])
        _attach(network, place, slot.to(some.device, some.dtype))


def _check_known(entry: Any) -> None:
    """Raise ValueError unless a record has every field with its type."""
    kinds = {
        "slot": str,
        "module": str,
        "path": list,
        "channels_last": bool,
        "isolate": bool,
        "trunk": bool,
        "width": int,
    }
    if not isinstance(entry, Mapping):
        raise ValueError(f"the list of attached places is damaged: an entry is {entry!r}")
    for name, kind in kinds.items():
        if type(entry.get(name)) is not kind:
            raise ValueError(f"the list of attached places is damaged: {name} is {entry.get(name, 'missing')!r}")
    layouts = [layout for layout, _ in LAYOUTS.values()]
    if (
        entry.get("layout") not in layouts
        or entry["width"] < 1
        or any(type(k) not in (int, str) for k in entry["path"])
    ):
        raise ValueError(f"the list of attached places is damaged at slot {entry['slot']!r}: {dict(entry)}")


def _attach(network: nn.Module, place: Place, slot: SeedSlot) -> None:
    container = _container(network)
    if container is None:
        container = AttachedSlots()
        network.add_module(CONTAINER, container)
    container[_key(slot.name)] = slot.train(network.training)
    container.places[slot.name] = place
    hook = _Grow(slot, place)
    container.handles[slot.name] = network.get_submodule(place.module).register_forward_hook(hook)


def _container(network: nn.Module) -> AttachedSlots | None:
    return getattr(network, CONTAINER, None)


def _is_trunk(network: nn.Module, slot: SeedSlot, example: Example, outputs: Any) -> bool:
    """Return True if all later layers get their data through `slot` alone, tested by doubling the batch there."""
    slot.branch = lambda _, x: torch.cat([x, x])
    try:
        longer = run(network, example)
    except REFUSALS:  # the doubled batch was combined with data that bypassed the slot
        return False
    finally:
        slot.branch = None
    return all(doubled(twice, once) for twice, once in zip(tensors(longer), tensors(outputs), strict=True))
