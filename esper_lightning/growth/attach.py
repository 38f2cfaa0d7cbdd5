"""Slots for any network: forward hooks put them behind modules that know nothing of growth."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper_lightning.blueprints import nearest
from esper_lightning.growth.nested import Path, first_tensor, pick, put, resolve, tensors
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.running import Example, batch_size, evaluating, repeat_rows, run
from esper_lightning.growth.slot import Layout, SeedSlot

CONTAINER = "grown_slots"
"""Child of the network that holds the attached slots; keys of its state dict begin so."""

LAYOUTS: dict[int, tuple[Layout, int]] = {4: ("image", 1), 3: ("sequence", 2), 2: ("vector", 1)}
"""Layout and axis of the channels, by number of axes: [B, C, H, W], [B, T, C], [B, C]."""


REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, AttributeError)
"""What a network may raise that is given a batch of unexpected length in its middle."""


class AttachedSlots(nn.ModuleDict):
    """The slots behind a network's modules. As a layer it is the identity: the network may be an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, _Place] = {}
        self.handles: dict[str, RemovableHandle] = {}

    def forward(self, x: Any) -> Any:
        return x


class _Place(NamedTuple):
    """Where a slot is."""

    module: str
    """It stands behind the output of this module."""
    path: Path
    """The way to the tensor in that output."""
    channels_last: bool
    """The tensor is [B, H, W, C]."""


class _Grow:
    """Forward hook that sends one tensor of a module's output through a slot.

    An object and not a closure, so that a deep copy of the network grows in its own slots.
    """

    def __init__(self, slot: SeedSlot, place: _Place) -> None:
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
    """Puts a slot behind modules of `network`, where seeds may grow from then on. Empty slots change nothing.

    Args:
        network: Any module; its weights stay as they are, and it gets one more child that holds the slots.
        names: Dotted names of modules, as in `named_modules`. Where a module returns several tensors, the slot takes
            the first, or the one that indices or keys in brackets lead to: `lstm[0]`, `encoder[features]`.
        example_input: A batch of at least two samples; a tuple holds positional, a dict keyword arguments. Runs on it,
            in evaluation mode, show layout and width of every place, and whether a shortcut leads around it.
        isolate: See SeedSlot.
        channels_last: Those of `names` whose features are [B, H, W, C] (a Swin transformer's); shapes do not tell.

    Returns:
        All the network's slots by name; those that are new in the order in which data meets them.

    Raises:
        ValueError, and leaves the network as it was: A name is unknown or named twice; a module does not run, or does
        not give features [B, C, H, W], [B, T, C] or [B, C]; the example has one sample only.
    """
    if hasattr(network, "_orig_mod"):
        raise ValueError("the network is compiled, and would not see its slots; attach them first, compile then")
    wanted = _check_names(network, names, channels_last)
    with evaluating(network), torch.no_grad(), ExitStack() as undo:
        found, outputs = _dry_run(network, wanted, example_input)
        _check_batch_axis(network, wanted, found, example_input)
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
    """Takes attached slots away, with whatever grew in them: the state dict has the keys it had before.

    Args:
        names: Slots to take away. None: all; ValueError if there is none.
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
    # A key may hold no dots, and may not be a name that the container has itself (`keys`, `values`).
    return f"at/{name.replace('.', '/')}"


def attachments(network: nn.Module) -> list[dict[str, Any]]:
    """Where slots were attached, as plain JSON."""
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
    """Attaches slots again where `attachments` of an equal network says; no example is needed."""
    some = next(network.parameters(), torch.zeros(()))
    modules = dict(network.named_modules())
    for entry in known:
        _check_known(entry)
        _check_module(entry["module"], list(modules))
        slot = SeedSlot(entry["slot"], entry["layout"], entry["width"], entry["isolate"], entry["trunk"])
        place = _Place(entry["module"], tuple(entry["path"]), entry["channels_last"])
        _attach(network, place, slot.to(some.device, some.dtype))


def _check_known(entry: Any) -> None:
    """Raises ValueError unless an entry has every part, of its type."""
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


def _attach(network: nn.Module, place: _Place, slot: SeedSlot) -> None:
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


class _Wanted(NamedTuple):
    """A slot as it was asked for."""

    module: str
    keys: list[str]
    channels_last: bool


def _check_names(network: nn.Module, names: Sequence[str], channels_last: Sequence[str]) -> dict[str, _Wanted]:
    if isinstance(names, str) or not names:
        raise ValueError(f"name at least one module, as a list of names; got {names!r}")
    for name in channels_last:
        if name not in names:
            raise ValueError(f"channels_last names {name!r}, which gets no slot; {nearest(name, list(names))}")
    taken = list(slots_of(network))
    modules = [name for name, _ in network.named_modules() if name]
    wanted: dict[str, _Wanted] = {}
    for name in names:
        if name in taken or name in wanted:
            raise ValueError(f"slot {name!r} is named twice; name each slot once")
        match = re.fullmatch(r"([^\[\]]+)((?:\[[^\[\]]+\])*)", name)
        if match is None:
            raise ValueError(f"slot {name!r}: write a module's name, and keys in brackets as in lstm[0]")
        _check_module(match[1], modules)
        wanted[name] = _Wanted(match[1], re.findall(r"\[([^\[\]]+)\]", match[2]), name in channels_last)
    return wanted


def _check_module(name: str, modules: Sequence[str]) -> None:
    if name not in modules:
        raise ValueError(f"the network has no module {name!r}; {nearest(name, modules)}")


def _dry_run(
    network: nn.Module, wanted: Mapping[str, _Wanted], example: Example
) -> tuple[dict[str, tuple[_Place, Tensor]], Any]:
    """Where each slot goes and what it will see, in the order of the data's way; and the network's output."""
    found: dict[str, tuple[_Place, Tensor]] = {}

    def watch(name: str, want: _Wanted) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            place, feature = _feature(name, want, output)
            if name in found and found[name][1].shape[1:] != feature.shape[1:]:
                raise ValueError(
                    f"module {want.module!r} runs several times, on features of different shapes; "
                    f"name a module that runs once"
                )
            found.setdefault(name, (place, feature))

        return hook

    with ExitStack() as hooks:
        for name, want in wanted.items():
            hook = network.get_submodule(want.module).register_forward_hook(watch(name, want))
            hooks.callback(hook.remove)
        outputs = run(network, example)
    for name, want in wanted.items():
        if name not in found:
            raise ValueError(f"module {want.module!r} does not run when the network does; name one that is called")
    return found, outputs


def _feature(name: str, want: _Wanted, output: Any) -> tuple[_Place, Tensor]:
    try:
        path = resolve(output, want.keys) if want.keys else first_tensor(output) or ()
    except LookupError:
        raise ValueError(f"slot {name!r}: the module's output has nothing at [{']['.join(want.keys)}]") from None
    feature = pick(output, path)
    if not isinstance(feature, Tensor) or not feature.is_floating_point():
        raise ValueError(f"slot {name!r}: the module gives {type(feature).__name__}, no floating-point tensor")
    if feature.is_nested:
        raise ValueError(f"slot {name!r}: a nested feature (nn.TransformerEncoder: enable_nested_tensor=False)")
    if feature.ndim not in LAYOUTS or (want.channels_last and feature.ndim != 4):
        raise ValueError(
            f"slot {name!r}: a feature of shape {tuple(feature.shape)} is none of [B, C, H, W], [B, T, C], [B, C]"
            + (" or, with channels_last, [B, H, W, C]" if want.channels_last else "")
        )
    return _Place(want.module, path, want.channels_last), feature


def _check_batch_axis(
    network: nn.Module, wanted: Mapping[str, _Wanted], found: Mapping[str, tuple[_Place, Tensor]], example: Example
) -> None:
    """Raises ValueError unless twice the samples give every feature twice, one behind the other."""
    rows = batch_size(example)
    if rows < 2:
        raise ValueError("the example has one sample only; give at least two, so that the batch's axis is known")
    try:
        again, _ = _dry_run(network, wanted, repeat_rows(example, rows, 2))
    except REFUSALS as error:
        raise ValueError(
            f"the network does not run on twice the example's {rows} samples ({error}); if an argument without a "
            f"batch axis has {rows} rows, give an example of another number of samples"
        ) from error
    for name, (_, feature) in found.items():
        if not _doubled(again[name][1], feature):
            raise ValueError(
                f"slot {name!r}: the first axis of the feature {tuple(feature.shape)} is not the batch's; "
                f"seeds need [B, …] (of nn.LSTM: the output, not the states, with batch_first=True)"
            )


def _doubled(twice: Tensor, once: Tensor) -> bool:
    """Up to rounding: kernels may depend on the number of rows."""
    if once.ndim == 0 or twice.shape != (2 * len(once), *once.shape[1:]):
        return False
    return torch.allclose(twice, torch.cat([once, once]), rtol=1e-3, atol=1e-5, equal_nan=True)


def _is_trunk(network: nn.Module, slot: SeedSlot, example: Example, outputs: Any) -> bool:
    """Does everything that follows see the data through `slot` alone? Found out by doubling the batch there."""
    slot.branch = lambda _, x: torch.cat([x, x])
    try:
        doubled = run(network, example)
    except REFUSALS:  # the doubled batch met one that went around the slot
        return False
    finally:
        slot.branch = None
    return all(_doubled(twice, once) for twice, once in zip(tensors(doubled), tensors(outputs), strict=True))
