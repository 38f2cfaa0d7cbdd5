"""Checks before slots are attached: features returned by the modules of a network, and their suitability for slots."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import suggest_name
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.nested import (
    ExampleInput,
    KeyPath,
    batch_size,
    call_network,
    first_tensor_path,
    get_at,
    repeat_rows,
    resolve_path,
)
from esper_lightning.growth.slot import Layout

LAYOUTS: dict[int, tuple[Layout, int]] = {4: ("image", 1), 3: ("sequence", 2), 2: ("vector", 1)}
"""Layout and channel axis of a feature by its number of axes: [B, C, H, W], [B, T, C], [B, C]."""

BATCH_LENGTH_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, AttributeError)
"""Exceptions that a network may raise if the batch has an unexpected length."""


class SlotSite(NamedTuple):
    """Location of an attached slot."""

    module: str
    """Name of the module whose output passes through the slot."""
    path: KeyPath
    """Path to the tensor within that output."""
    channels_last: bool
    """True if the tensor is [B, H, W, C]."""


class SlotRequest(NamedTuple):
    """Requested location of a slot: module name, keys into its output, and memory layout."""

    module: str
    keys: list[str]
    channels_last: bool


def parse_slot_requests(
    network: nn.Module, names: Sequence[str], channels_last: Sequence[str]
) -> dict[str, SlotRequest]:
    """Return the slot request that each name stands for, by name. Raises ValueError for an invalid name."""
    if isinstance(names, str) or not names:
        raise ValueError(f"name at least one module, as a list of names; got {names!r}")
    for name in channels_last:
        if name not in names:
            raise ValueError(f"channels_last names {name!r}, which gets no slot; {suggest_name(name, list(names))}")
    existing = list(slots_of(network))
    modules = [name for name, _ in network.named_modules() if name]
    requests: dict[str, SlotRequest] = {}
    for name in names:
        if name in existing or name in requests:
            raise ValueError(f"slot {name!r} is named twice; name each slot once")
        match = re.fullmatch(r"([^\[\]]+)((?:\[[^\[\]]+\])*)", name)
        if match is None:
            raise ValueError(f"slot {name!r}: write a module's name, and keys in brackets as in lstm[0]")
        check_module_name(match[1], modules)
        requests[name] = SlotRequest(match[1], re.findall(r"\[([^\[\]]+)\]", match[2]), name in channels_last)
    return requests


def check_module_name(name: str, modules: Sequence[str]) -> None:
    """Raise ValueError, with a suggestion, if the network has no module of this name."""
    if name not in modules:
        raise ValueError(f"the network has no module {name!r}; {suggest_name(name, modules)}")


def dry_run(
    network: nn.Module, requests: Mapping[str, SlotRequest], example: ExampleInput
) -> tuple[dict[str, tuple[SlotSite, Tensor]], Any]:
    """Return site and feature of each slot, in the order of execution, and the network's output."""
    found: dict[str, tuple[SlotSite, Tensor]] = {}

    def make_hook(name: str, request: SlotRequest) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            site, feature = _locate_feature(name, request, output)
            if name in found and found[name][1].shape[1:] != feature.shape[1:]:
                raise ValueError(
                    f"module {request.module!r} runs again, on a feature of another shape; name a module that runs once"
                )
            found.setdefault(name, (site, feature))

        return hook

    with ExitStack() as hooks:
        for name, request in requests.items():
            hook = network.get_submodule(request.module).register_forward_hook(make_hook(name, request))
            hooks.callback(hook.remove)
        outputs = call_network(network, example)
    for name, request in requests.items():
        if name not in found:
            raise ValueError(f"module {request.module!r} does not run when the network does; name one that is called")
    return found, outputs


def _locate_feature(name: str, request: SlotRequest, output: Any) -> tuple[SlotSite, Tensor]:
    try:
        path = resolve_path(output, request.keys) if request.keys else first_tensor_path(output) or ()
    except LookupError:
        raise ValueError(f"slot {name!r}: the module's output has nothing at [{']['.join(request.keys)}]") from None
    feature = get_at(output, path)
    if not isinstance(feature, Tensor) or not feature.is_floating_point():
        raise ValueError(f"slot {name!r}: the module gives {type(feature).__name__}, no floating-point tensor")
    if feature.is_nested:
        raise ValueError(f"slot {name!r}: a nested feature (nn.TransformerEncoder: enable_nested_tensor=False)")
    if feature.ndim not in LAYOUTS or (request.channels_last and feature.ndim != 4):
        raise ValueError(
            f"slot {name!r}: a feature of shape {tuple(feature.shape)} is none of [B, C, H, W], [B, T, C], [B, C]"
            + (" or, with channels_last, [B, H, W, C]" if request.channels_last else "")
        )
    return SlotSite(request.module, path, request.channels_last), feature


def check_batch_axis(
    network: nn.Module,
    requests: Mapping[str, SlotRequest],
    found: Mapping[str, tuple[SlotSite, Tensor]],
    *,
    example: ExampleInput,
) -> None:
    """Raise ValueError unless repeating all samples repeats every feature along its first axis."""
    rows = batch_size(example)
    if rows < 2:
        raise ValueError("the example has one sample only; give at least two, so that the batch's axis is known")
    try:
        doubled_found, _ = dry_run(network, requests, repeat_rows(example, rows, 2))
    except BATCH_LENGTH_ERRORS as error:
        raise ValueError(
            f"the network does not run on twice the example's {rows} samples ({error}); if an argument without a "
            f"batch axis has {rows} rows, give an example of another number of samples"
        ) from error
    for name, (_, feature) in found.items():
        if not is_doubled(doubled_found[name][1], feature):
            raise ValueError(
                f"slot {name!r}: the first axis of the feature {tuple(feature.shape)} is not the batch's; "
                f"seeds need [B, …] (of nn.LSTM: the output, not the states, with batch_first=True)"
            )


def is_doubled(twice: Tensor, once: Tensor) -> bool:
    """Return True if `twice` is `once` repeated along the first axis, up to rounding that depends on the batch size."""
    if once.ndim == 0 or twice.shape != (2 * len(once), *once.shape[1:]):
        return False
    return torch.allclose(twice, torch.cat([once, once]), rtol=1e-3, atol=1e-5, equal_nan=True)
