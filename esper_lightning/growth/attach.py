"""Slots for any network: forward hooks insert them after modules that were not written for growth."""

import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from esper_lightning.growth.attach_checks import (
    BATCH_LENGTH_ERRORS,
    LAYOUTS,
    SlotSite,
    check_batch_axis,
    check_module_name,
    dry_run,
    is_doubled,
    parse_slot_requests,
)
from esper_lightning.growth.lifecycle import check_slot_names, slots_of
from esper_lightning.growth.nested import ExampleInput, call_network, evaluation_mode, get_at, iter_tensors, replace_at
from esper_lightning.growth.recorded import RECORD, Recorded, check_before_loading, decode_record, stop_checking
from esper_lightning.growth.slot import SeedSlot

CONTAINER_NAME = "grown_slots"
"""Name of the child module that holds the attached slots; the prefix of their keys in the state dict."""

MAX_WIDTH, MAX_PATH_LENGTH = 2**20, 16
"""Largest number of channels, and largest number of keys into a module's output, of a slot that is loaded."""


class AttachedSlots(Recorded, nn.ModuleDict):
    """Container of the attached slots. As a layer it is the identity, because the network may be an nn.Sequential.

    Once something grew, its record in the state dict tells where and how the slots are attached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[str, SlotSite] = {}
        self.hook_handles: dict[str, RemovableHandle] = {}

    def forward(self, x: Any) -> Any:
        return x

    def slots(self) -> dict[str, SeedSlot]:
        """Return the attached slots by name."""
        return {slot.name: slot for slot in self.values() if isinstance(slot, SeedSlot)}

    def record(self) -> list[dict[str, Any]] | None:
        return self.attachments() if any(slot.record() is not None for slot in self.slots().values()) else None

    def attachments(self) -> list[dict[str, Any]]:
        """Return where and how each slot was attached, in plain JSON types."""
        slots = self.slots()
        return [
            {
                "slot": name,
                "module": site.module,
                "path": list(site.path),
                "channels_last": site.channels_last,
                "layout": slots[name].layout,
                "width": slots[name].width,
                "isolate": slots[name].detach_input,
                "trunk": slots[name].on_single_path,
            }
            for name, site in self.sites.items()
        ]

    def check_record(self, record: Any, saved: dict[str, Any]) -> None:
        present = {entry["slot"]: entry for entry in self.attachments()}
        for entry in _check_records(record):
            name = entry["slot"]
            if name not in present:
                if any(key.startswith(f"{_container_key(name)}.") for key in saved):
                    raise ValueError(
                        f"a seed grew in slot {name!r}, which the network lacks; attach it before the weights are "
                        f"loaded, by attach_slots or attach_from_state_dict"
                    )
            elif any(entry[key] != present[name][key] for key in ("module", "path", "channels_last")):
                raise ValueError(
                    f"slot {name!r} was attached elsewhere: {reprlib.repr(entry)}, not {reprlib.repr(present[name])}"
                )

    def restore_record(self, record: Any) -> None:
        """Do nothing: slots are attached before weights are loaded; see `attach_from_state_dict`."""

    def forget(self) -> None:
        """Do nothing: slots in which nothing grew are not recorded, and stay."""


class _SlotHook:
    """Forward hook that passes one tensor of a module's output through a slot.

    It is an object and not a closure, so that a deep copy of the network uses its own copies of the slots.
    """

    def __init__(self, slot: SeedSlot, site: SlotSite) -> None:
        self.slot = slot
        self.site = site

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        feature, channels_last = get_at(output, self.site.path), self.site.channels_last
        grown = self.slot(feature.movedim(-1, 1)).movedim(1, -1) if channels_last else self.slot(feature)
        return replace_at(output, self.site.path, grown)


def attach_slots(
    network: nn.Module,
    names: Sequence[str],
    example_input: ExampleInput,
    *,
    detach_input: bool | None = None,
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
    if hasattr(network, "_orig_mod") or network._compiled_call_impl is not None:
        raise ValueError("the network is compiled, and would not see its slots; attach them first, compile then")
    requests = parse_slot_requests(network, names, channels_last)
    with evaluation_mode(network), torch.no_grad(), ExitStack() as undo:
        found, outputs = dry_run(network, requests, example_input)
        check_batch_axis(network, requests, found, example=example_input)
        attached: list[str] = []
        undo.callback(detach_slots, network, attached)
        for name, (site, feature) in found.items():
            layout, axis = LAYOUTS[feature.ndim]
            width = feature.shape[-1 if site.channels_last else axis]
            slot = SeedSlot(name, layout, width, detach_input=detach_input)
            _attach(network, site, slot.to(feature.device, feature.dtype))
            attached.append(name)
        for name in found:
            slot = slots_of(network)[name]
            slot.on_single_path = _is_on_single_path(network, slot, example_input, outputs=outputs)
        undo.pop_all()
    return slots_of(network)


def detach_slots(network: nn.Module, names: Iterable[str] | None = None) -> None:
    """Remove attached slots with everything grown in them; the state dict has its earlier keys again.

    Args:
        names: Slots to remove. None: all of them.

    Raises ValueError, and changes nothing, if a named slot is not attached, or for None if no slot is.
    """
    container = _container(network)
    names = None if names is None else list(names)
    if container is None:
        if names is None or names:
            raise ValueError("the network has no attached slots; there is nothing to detach")
        return
    names = list(container.sites) if names is None else names
    check_slot_names(names, container.sites)
    for name in names:
        container.hook_handles.pop(name).remove()
        del container.sites[name], container[_container_key(name)]
    if not container.sites:
        delattr(network, CONTAINER_NAME)
        if not slots_of(network):
            stop_checking(network)


def _container_key(name: str) -> str:
    # Module names must not contain dots or equal an attribute of nn.ModuleDict (`keys`, `values`).
    return f"at/{name.replace('.', '/')}"


def attachment_records(network: nn.Module) -> list[dict[str, Any]]:
    """Return where and how each slot was attached, in plain JSON types."""
    container = _container(network)
    return [] if container is None else container.attachments()


def parts_without_slots(network: nn.Module) -> list[nn.Module]:
    """Return the largest submodules of `network` with parameters, a forward pass and no slot inside it."""
    hooked_modules = {
        module.get_submodule(entry["module"]) for module in network.modules() for entry in attachment_records(module)
    }

    def parts_of(module: nn.Module) -> list[nn.Module]:
        if isinstance(module, SeedSlot) or not any(True for _ in module.parameters()):
            return []
        # A slot attached to the module itself is a hook, which runs after the forward pass and not inside it.
        slots = [m for m in module.modules() if isinstance(m, SeedSlot) or (m in hooked_modules and m is not module)]
        if slots or type(module).forward is nn.Module.forward:  # containers such as ModuleList define no forward pass
            return [part for child in module.children() for part in parts_of(child)]
        return [module]

    return list(dict.fromkeys(parts_of(network)))


def attach_from_records(network: nn.Module, records: Sequence[Mapping[str, Any]]) -> None:
    """Attach slots from the records that `attachment_records` returned for an equal network; needs no example.

    Raises ValueError, and attaches nothing, if a record is damaged or does not fit the network.
    """
    reference = next(network.parameters(), torch.zeros(()))
    modules = [name for name, _ in network.named_modules() if name]
    existing = list(slots_of(network))
    for record in _check_records(records):
        check_module_name(record["module"], modules)
    names = [*existing, *(record["slot"] for record in records)]
    check_slot_names(names, names)
    if len({_container_key(name) for name in names}) < len(names):
        raise ValueError("the list of attached slots is damaged: two names differ in dots and slashes alone")
    for record in records:
        slot = SeedSlot(
            record["slot"],
            record["layout"],
            record["width"],
            detach_input=record["isolate"],
            on_single_path=record["trunk"],
        )
        site = SlotSite(record["module"], tuple(record["path"]), record["channels_last"])
        _attach(network, site, slot.to(reference.device, reference.dtype))


def attach_from_state_dict(network: nn.Module, state: Mapping[str, Any], prefix: str = "") -> None:
    """Attach the slots that a state dict tells of and that the network lacks, so that it can be loaded.

    Args:
        network: Network as it was before slots were attached, or with some of them.
        state: State dict of the grown network, or of a module that contains it.
        prefix: What the names of the network's weights begin with, such as `model.` in a LightningModule.

    Raises ValueError, and attaches nothing, if the state dict is damaged or of another network. Does nothing if it
    tells of no attached slots.
    """
    name = f"{prefix}{CONTAINER_NAME}.{RECORD}"
    if name in state:
        existing = slots_of(network)
        records = _check_records(decode_record(state[name]))
        attach_from_records(network, [record for record in records if record["slot"] not in existing])


def _check_records(records: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(records, list):
        raise ValueError(f"the list of attached slots is damaged: it is {reprlib.repr(records)}")
    for record in records:
        _check_record(record)
    return records


def _check_record(record: Any) -> None:
    """Raise ValueError unless the saved record of a slot is complete, of the right types and within limits."""
    field_types = {
        "slot": str,
        "module": str,
        "path": list,
        "channels_last": bool,
        "isolate": bool,
        "trunk": bool,
        "width": int,
    }
    if not isinstance(record, Mapping):
        raise ValueError(f"the list of attached slots is damaged: an entry is {reprlib.repr(record)}")
    for name, field_type in field_types.items():
        if type(record.get(name)) is not field_type:
            given = reprlib.repr(record.get(name, "missing"))
            raise ValueError(f"the list of attached slots is damaged: {name} is {given}")
    layouts = [layout for layout, _ in LAYOUTS.values()]
    if (
        record.get("layout") not in layouts
        or not 1 <= record["width"] <= MAX_WIDTH
        or len(record["path"]) > MAX_PATH_LENGTH
        or any(type(k) not in (int, str) for k in record["path"])
    ):
        raise ValueError(f"the list of attached slots is damaged: {reprlib.repr(dict(record))}")


def _attach(network: nn.Module, site: SlotSite, slot: SeedSlot) -> None:
    container = _container(network)
    if container is None:
        container = AttachedSlots()
        network.add_module(CONTAINER_NAME, container)
        check_before_loading(network)
    container[_container_key(slot.name)] = slot.train(network.training)
    container.sites[slot.name] = site
    hook = _SlotHook(slot, site)
    container.hook_handles[slot.name] = network.get_submodule(site.module).register_forward_hook(hook)
    # torch.compile does not guard hooks: what it compiled before would go on without the slot. Importing it takes
    # seconds, and before that nothing is compiled.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _container(network: nn.Module) -> AttachedSlots | None:
    return getattr(network, CONTAINER_NAME, None)


def _is_on_single_path(network: nn.Module, slot: SeedSlot, example: ExampleInput, *, outputs: Any) -> bool:
    """Return True if all later layers get their data through `slot` alone, tested by doubling the batch there."""
    slot.override = lambda _, x: torch.cat([x, x])
    try:
        outputs_of_doubled = call_network(network, example)
    except BATCH_LENGTH_ERRORS:  # the doubled batch was combined with data that bypassed the slot
        return False
    finally:
        slot.override = None
    return all(
        is_doubled(twice, once)
        for twice, once in zip(iter_tensors(outputs_of_doubled), iter_tensors(outputs), strict=True)
    )
