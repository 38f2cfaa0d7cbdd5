"""Checks before slots are attached: features returned by the modules of a network, and their suitability for slots."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import nearest
from esper_lightning.growth.nested import Path, first_tensor, pick, resolve
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.running import Example, batch_size, repeat_rows, run
from esper_lightning.growth.slot import Layout

LAYOUTS: dict[int, tuple[Layout, int]] = {4: ("image", 1), 3: ("sequence", 2), 2: ("vector", 1)}
"""Layout and channel axis of a feature by its number of axes: [B, C, H, W], [B, T, C], [B, C]."""

REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, AttributeError)
"""Exceptions that a network may raise if the batch has an unexpected length."""


class Place(NamedTuple):
    """Location of an attached slot."""

    module: str
    """Name of the module whose output passes through the slot."""
    path: Path
    """Path to the tensor within that output."""
    channels_last: bool
    """Whether the tensor is [B, H, W, C]."""


class Wanted(NamedTuple):
    """Requested location of a slot: module name, keys into its output, and memory layout."""

    module: str
    keys: list[str]
    channels_last: bool


def check_names(network: nn.Module, names: Sequence[str], channels_last: Sequence[str]) -> dict[str, Wanted]:
    """Return the slot request that each name stands for, by name. Raises ValueError for an invalid name."""
    if isinstance(names, str) or not names:
        raise ValueError(f"name at least one module, as a list of names; got {names!r}")
    for name in channels_last:
        if name not in names:
            raise ValueError(f"channels_last names {name!r}, which gets no slot; {nearest(name, list(names))}")
    taken = list(slots_of(network))
    modules = [name for name, _ in network.named_modules() if name]
    wanted: dict[str, Wanted] = {}
    for name in names:
        if name in taken or name in wanted:
            raise ValueError(f"slot {name!r} is named twice; name each slot once")
        match = re.fullmatch(r"([^\[\]]+)((?:\[[^\[\]]+\])*)", name)
        if match is None:
            raise ValueError(f"slot {name!r}: write a module's name, and keys in brackets as in lstm[0]")
        check_module(match[1], modules)
        wanted[name] = Wanted(match[1], re.findall(r"\[([^\[\]]+)\]", match[2]), name in channels_last)
    return wanted


def check_module(name: str, modules: Sequence[str]) -> None:
    """Raise ValueError, with a suggestion, if the network has no module of this name."""
    if name not in modules:
        raise ValueError(f"the network has no module {name!r}; {nearest(name, modules)}")


def dry_run(
    network: nn.Module, wanted: Mapping[str, Wanted], example: Example
) -> tuple[dict[str, tuple[Place, Tensor]], Any]:
    """Return site and feature of each slot, in the order of execution, and the network's output."""
    found: dict[str, tuple[Place, Tensor]] = {}

    def watch(name: str, want: Wanted) -> Callable[..., None]:
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


def _feature(name: str, want: Wanted, output: Any) -> tuple[Place, Tensor]:
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
    return Place(want.module, path, want.channels_last), feature


def check_batch_axis(
    network: nn.Module, wanted: Mapping[str, Wanted], found: Mapping[str, tuple[Place, Tensor]], example: Example
) -> None:
    """Raise ValueError unless repeating all samples repeats every feature along its first axis."""
    rows = batch_size(example)
    if rows < 2:
        raise ValueError("the example has one sample only; give at least two, so that the batch's axis is known")
    try:
        again, _ = dry_run(network, wanted, repeat_rows(example, rows, 2))
    except REFUSALS as error:
        raise ValueError(
            f"the network does not run on twice the example's {rows} samples ({error}); if an argument without a "
            f"batch axis has {rows} rows, give an example of another number of samples"
        ) from error
    for name, (_, feature) in found.items():
        if not doubled(again[name][1], feature):
            raise ValueError(
                f"slot {name!r}: the first axis of the feature {tuple(feature.shape)} is not the batch's; "
                f"seeds need [B, …] (of nn.LSTM: the output, not the states, with batch_first=True)"
            )


def doubled(twice: Tensor, once: Tensor) -> bool:
    """Return True if `twice` is `once` repeated along the first axis, up to rounding that depends on the batch size."""
    if once.ndim == 0 or twice.shape != (2 * len(once), *once.shape[1:]):
        return False
    return torch.allclose(twice, torch.cat([once, once]), rtol=1e-3, atol=1e-5, equal_nan=True)
