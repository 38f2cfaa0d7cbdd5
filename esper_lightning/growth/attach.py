"""Slots for any network: forward hooks insert them after modules that were not written for growth."""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from esper_lightning.growth.blueprints import suggest_name
from esper_lightning.growth.lifecycle import check_slot_names, slots_of
from esper_lightning.growth.slot import EXTRA_STATE, Layout, SeedSlot, SlotHook, decode, encode
from esper_lightning.runtime.nested import (
    BATCH_LENGTH_ERRORS,
    ExampleInput,
    KeyPath,
    batch_size,
    call_network,
    evaluation_mode,
    first_tensor_path,
    get_at,
    iter_tensors,
    repeat_rows,
    replace_at,
)

CONTAINER_NAME = "grown_slots"
"""Name of the child module that holds the attached slots; the prefix of their keys in the state dict."""

LAYOUTS: dict[int, tuple[Layout, int]] = {4: ("image", 1), 3: ("sequence", 2), 2: ("vector", 1)}
"""Layout and channel axis of a feature by its number of axes: [B, C, H, W], [B, T, C], [B, C]."""

WIDTHS = ("out_channels", "num_features", "num_channels", "out_features", "embedding_dim", "normalized_shape")
"""Attributes of layers of torch with the number of channels of their output."""

SlotPlace = Mapping[str, Any]
"""Where a slot is attached, in plain JSON types: `slot`, its name; `module`, whose output passes through it; `path` to
the tensor in that output; `channels_last`, if the tensor is [B, H, W, C]; and the arguments of its `SeedSlot`."""


class Feature(NamedTuple):
    """A tensor in the output of a module."""

    path: KeyPath  # from the output to the tensor
    tensor: Tensor
    axis: int | None  # of the channels, if the layer that gave the tensor tells it


class AttachedSlots(nn.ModuleDict):
    """Container of the attached slots, whose places are its extra state. Its forward pass returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, SlotPlace] = {}
        self.hooks: dict[str, RemovableHandle] = {}
        self.register_load_state_dict_pre_hook(_accept_host_without_slots)

    @staticmethod
    def key(name: str) -> str:
        # Module names must not contain dots or equal an attribute of nn.ModuleDict (`keys`, `values`).
        return f"at/{name.replace('.', '/')}"

    def forward(self, x: Any) -> Any:
        return x

    def get_extra_state(self) -> Tensor:
        return encode(list(self.places.values()))

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError if the state is of a network whose slots are attached elsewhere; nothing else changes."""
        for place in decode(state):
            name, present = place["slot"], self.places.get(place["slot"])
            if present is None:
                raise ValueError(
                    f"the state has slot {name!r}, which the network lacks; attach it before the weights are loaded, "
                    f"by attach_slots or attach_from_state_dict"
                )
            if any(place[key] != present[key] for key in ("module", "path", "channels_last")):
                raise ValueError(f"slot {name!r} was attached elsewhere: {place}, not {present}")


def _accept_host_without_slots(container: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a network with slots load the state dict that it had without them."""
    state.setdefault(prefix + EXTRA_STATE, encode([]))


def attach_slots(
    network: nn.Module,
    names: Sequence[str],
    example_input: ExampleInput,
    *,
    detach_input: bool = False,
    channels_last: Sequence[str] = (),
) -> dict[str, SeedSlot]:
    """Attach a slot after each named module of `network`, in place. Empty slots leave the outputs unchanged.

    Args:
        network: Any module. Its weights are unchanged; it gets one more child that holds the slots.
        names: Dotted names of modules, as in `named_modules`. If a module returns several tensors, the slot takes the
            first floating-point one.
        example_input: Batch of at least two samples; a tuple holds positional, a dict keyword arguments. Forward passes
            on it in evaluation mode determine layout and width at each slot, and whether a shortcut bypasses it.
        detach_input: See SeedSlot.
        channels_last: Subset of `names` whose features are [B, H, W, C] (as in a Swin transformer); the shape alone
            does not reveal it. Not needed where the axis of channels can be read from the torch layer before it.

    Returns:
        All slots of the network by name; new slots come last, in the order in which data passes through them.

    Raises:
        ValueError: A name is unknown or given twice; a module does not run, or does not return features [B, C, H, W],
            [B, T, C] or [B, C]; the example has only one sample. The network is then unchanged.
    """
    if is_compiled(network):
        raise ValueError("the network is compiled, and would not see its slots; attach them first, compile then")
    if any(isinstance(part, DistributedDataParallel) for part in network.modules()):
        raise ValueError("DistributedDataParallel would not average the gradients of seeds; use the callback Grow")
    check_new_slots(network, names)
    for name in channels_last:
        if name not in names:
            raise ValueError(f"channels_last names {name!r}, which gets no slot; {suggest_name(name, list(names))}")
    with evaluation_mode(network), torch.no_grad():
        features, outputs = _dry_run(network, names, example_input)
        rows = batch_size(example_input)
        if rows < 2:
            raise ValueError("the example has one sample only; give at least two, so that the batch's axis is known")
        try:
            doubled, _ = _dry_run(network, names, repeat_rows(example_input, rows, 2))
        except BATCH_LENGTH_ERRORS as error:
            raise ValueError(
                f"the network does not run on twice the example's {rows} samples ({error}); if an argument without a "
                f"batch axis has {rows} rows, give an example of another number of samples"
            ) from error
        places: list[SlotPlace] = []
        for name, (path, feature, axis_of_channels) in features.items():
            is_channels_last = name in channels_last or (feature.ndim, axis_of_channels) == (4, 3)
            if (feature.ndim, axis_of_channels) == (3, 1):
                warnings.warn(
                    f"slot {name!r}: the feature {tuple(feature.shape)} seems to be [B, C, T], by the layer that gave "
                    f"it, and seeds take it for [B, T, C]; name a module that gives it so",
                    stacklevel=2,
                )
            _check_feature(name, feature, doubled[name].tensor, is_channels_last=is_channels_last)
            layout, axis = LAYOUTS[feature.ndim]
            width = feature.shape[-1 if is_channels_last else axis]
            place = {"slot": name, "module": name, "path": list(path), "channels_last": is_channels_last}
            place |= {"layout": layout, "width": width, "detach_input": detach_input}
            is_single = _is_on_single_path(network, name, path, example=example_input, outputs=outputs)
            places.append(place | {"on_single_path": is_single})
    for place in places:
        _attach(network, place, like=features[place["slot"]].tensor)
    return slots_of(network)


def _check_feature(name: str, feature: Tensor, doubled: Tensor, *, is_channels_last: bool) -> None:
    """Raise ValueError if seeds cannot grow on a feature. `doubled` is the feature for twice the batch."""
    if feature.ndim not in LAYOUTS or (is_channels_last and feature.ndim != 4):
        raise ValueError(
            f"slot {name!r}: a feature of shape {tuple(feature.shape)} is none of [B, C, H, W], [B, T, C], "
            f"[B, C]{' or, with channels_last, [B, H, W, C]' if is_channels_last else ''}"
        )
    if _is_doubled(doubled, feature):
        return
    if len(doubled) == 2 * len(feature):
        raise ValueError(
            f"slot {name!r}: rows of the feature {tuple(feature.shape)} change with other rows of the batch or with "
            f"random numbers, or its first axis has more than the batch; name a module ahead of the layer that does "
            f"this"
        )
    raise ValueError(
        f"slot {name!r}: the first axis of the feature {tuple(feature.shape)} is not the batch's; seeds need [B, …] "
        f"(of nn.LSTM: the output, not the states, with batch_first=True)"
    )


def is_compiled(module: nn.Module) -> bool:
    """Return True if torch.compile has wrapped this module, or replaced its call or its forward method."""
    own = vars(module).get("forward")  # torch.compiler.disable leaves the same attribute, beside one of its own
    is_own_compiled = hasattr(own, "_torchdynamo_orig_callable") and not hasattr(own, "_torchdynamo_disable")
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None or is_own_compiled


def check_new_slots(network: nn.Module, names: Sequence[str]) -> None:
    """Raise ValueError if one of these modules is unknown, is named twice, or has a slot already."""
    if isinstance(names, str) or not names:
        raise ValueError(f"name at least one module, as a list of names; got {names!r}")
    existing = slots_of(network)
    for i, name in enumerate(names):
        if name in existing:
            raise ValueError(f"slot {name!r} exists already; leave it out")
        if name in names[:i]:
            raise ValueError(f"slot {name!r} is named twice; name each slot once")
        _check_module_name(network, name)


def _check_module_name(network: nn.Module, name: str) -> None:
    modules = [name for name, _ in network.named_modules() if name]
    if name not in modules:
        raise ValueError(f"the network has no module {name!r}; {suggest_name(name, modules)}")


def _dry_run(network: nn.Module, names: Sequence[str], example: ExampleInput) -> tuple[dict[str, Feature], Any]:
    """Return the feature at each new slot, in the order of execution, and the network's output."""
    features: dict[str, Feature] = {}
    shape: tuple[int, ...] = ()  # of the latest output whose channels are known
    axis = 0  # of these channels

    def note_channels(layer: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal shape, axis
        now = tuple(output.shape) if isinstance(output, Tensor) and not output.is_nested else ()
        width = next((getattr(layer, name) for name in WIDTHS if hasattr(layer, name)), None)
        if width is not None:
            axes = [i for i in range(1, len(now)) if width in (now[i], now[i : i + 1])]
            shape, axis = (now, axes[0]) if len(axes) == 1 else ((), 0)
        elif shape and len(now) == len(shape) and now[axis] == shape[axis]:  # an activation, a dropout or a pool
            shape = now

    def make_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            path = first_tensor_path(output) or ()
            feature = get_at(output, path)
            if not isinstance(feature, Tensor) or not feature.is_floating_point():
                raise ValueError(f"slot {name!r}: the module gives {type(feature).__name__}, no floating-point tensor")
            if feature.is_nested:
                raise ValueError(f"slot {name!r}: a nested feature (nn.TransformerEncoder: enable_nested_tensor=False)")
            found = Feature(path, feature, _axis_of_channels(feature.shape, shape, axis))
            if features.setdefault(name, found).tensor.shape[1:] != feature.shape[1:]:
                raise ValueError(
                    f"module {name!r} runs again, on a feature of another shape; name a module that runs once"
                )

        return hook

    with ExitStack() as hooks:
        for module in network.modules():
            if any(hasattr(module, name) for name in WIDTHS) or not list(module.children()):
                hooks.callback(module.register_forward_hook(note_channels).remove)
        for name in names:  # after these, so that a layer may be named itself
            hooks.callback(network.get_submodule(name).register_forward_hook(make_hook(name)).remove)
        outputs = call_network(network, example)
    for name in names:
        if name not in features:
            raise ValueError(f"module {name!r} does not run when the network does; name one that is called")
    return features, outputs


def _axis_of_channels(feature: Sequence[int], shape: Sequence[int], axis: int) -> int | None:
    """Return the axis of a feature's channels, if the latest known output, with them in `axis`, tells it; else None."""
    if tuple(feature) == shape:
        return axis
    # Rows of tokens that have become images again, with the channels last or first.
    is_last = len(feature) == 4 and axis == len(shape) - 1 > 0 and feature[1] != shape[axis] == feature[3]
    return 3 if is_last else None


def _is_on_single_path(network: nn.Module, module: str, path: KeyPath, *, example: ExampleInput, outputs: Any) -> bool:
    """Return True if no shortcut bypasses the feature at `path` in a module's output.

    Then all outputs are doubled if the batch is repeated here, as a counterfactual pass may do. `outputs` are those of
    the network for the `example`.
    """

    def double(_: nn.Module, __: Any, output: Any) -> Any:
        return replace_at(output, path, torch.cat([get_at(output, path)] * 2))

    with ExitStack() as hooks:
        hooks.callback(network.get_submodule(module).register_forward_hook(double).remove)
        try:
            doubled = call_network(network, example)
        except BATCH_LENGTH_ERRORS:  # the doubled batch was combined with data that bypassed the slot
            return False
    return all(_is_doubled(twice, x) for twice, x in zip(iter_tensors(doubled), iter_tensors(outputs), strict=True))


def _is_doubled(twice: Tensor, once: Tensor) -> bool:
    """Return True if `twice` is `once` repeated along the first axis, up to rounding that depends on the batch size."""
    if once.ndim == 0 or twice.shape != (2 * len(once), *once.shape[1:]):
        return False
    return torch.allclose(twice, torch.cat([once, once]), rtol=1e-3, atol=1e-5, equal_nan=True)


def _attach(network: nn.Module, place: SlotPlace, *, like: Tensor) -> None:
    """Attach a slot at its place, on the device and with the dtype of `like`."""
    if not hasattr(network, CONTAINER_NAME):
        network.add_module(CONTAINER_NAME, AttachedSlots())
    container: AttachedSlots = getattr(network, CONTAINER_NAME)
    name, width, is_single = place["slot"], place["width"], place["on_single_path"]
    slot = SeedSlot(name, place["layout"], width, detach_input=place["detach_input"], on_single_path=is_single)
    container[container.key(name)] = slot.to(like.device, like.dtype).train(network.training)
    container.places[name] = place
    hook = SlotHook(slot, tuple(place["path"]), place["channels_last"])
    container.hooks[name] = network.get_submodule(place["module"]).register_forward_hook(hook)
    # torch.compile does not guard hooks, so earlier compiled code would skip the slot. torch._dynamo takes seconds to
    # import; if it is not loaded, nothing has been compiled.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def attached_places(network: nn.Module) -> list[dict[str, Any]]:
    """Return where and how each slot was attached, in plain JSON types."""
    container = getattr(network, CONTAINER_NAME, None)
    return [] if container is None else [dict(place) for place in container.places.values()]


def attach_at(network: nn.Module, places: Iterable[SlotPlace]) -> None:
    """Attach missing slots at the `places` of `attached_places`. Raises ValueError, and attaches none, if it cannot."""
    existing = slots_of(network)
    missing = [place for place in places if place["slot"] not in existing]
    for place in missing:
        _check_module_name(network, place["module"])
    reference = next(network.parameters(), torch.zeros(()))  # slots get its device and dtype
    for place in missing:
        _attach(network, place, like=reference)


def attach_from_state_dict(network: nn.Module, state: Mapping[str, Any], prefix: str = "") -> None:
    """Attach the slots that a state dict tells of and that the network lacks, so that it can be loaded.

    `prefix` is what the names of the network's weights begin with, such as `model.` in a LightningModule.

    Raises ValueError, and attaches nothing, if the network lacks a module that has a slot in the state dict.
    """
    name = f"{prefix}{CONTAINER_NAME}.{EXTRA_STATE}"
    if name in state:
        attach_at(network, decode(state[name]))


def detach_slots(network: nn.Module, names: Iterable[str] | None = None) -> None:
    """Remove attached slots with everything grown in them; without any the state dict has its earlier keys again.

    `names` None: all slots. Raises ValueError, and changes nothing, if a named slot is not attached, or none is.
    """
    container = getattr(network, CONTAINER_NAME, None)
    if container is None:
        raise ValueError("the network has no attached slots; there is nothing to detach")
    names = list(container.places if names is None else names)
    check_slot_names(names, container.places)
    for name in names:
        container.hooks.pop(name).remove()
        del container.places[name], container[container.key(name)]
    if not container.places:
        delattr(network, CONTAINER_NAME)
