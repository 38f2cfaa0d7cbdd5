"""Folding of fossilized seeds into the host's layers: the same outputs from fewer layers.

A seed that consists of linear layers only is an affine map M·x + b of the channels (with a 3×3 kernel
for `conv_light`). It can be merged into a linear layer directly before or after the slot. Otherwise a convolution and
its shortcut become one convolution in the slot (https://arxiv.org/abs/2101.03697).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import AttachedSlots
from esper_lightning.growth.blueprints import Residual
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import SeedSlot, new_folded
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.nested import ExampleInput, call_network, evaluation_mode, iter_tensors, max_difference

OUTPUT_TOLERANCE = 2e-6
"""Change of the outputs, relative to the largest output, that is always accepted as float32 rounding."""

EFFECT_TOLERANCE = 1e-4
"""Change of the outputs, relative to the effect of the seed, that is accepted as rounding. A wrong fold changes the
outputs about as much as the seed does."""

PASS_THROUGH_LAYERS = (nn.Identity, nn.Flatten, AttachedSlots)
"""Layers that may return their input unchanged, in training too; Dropout does so only in evaluation mode."""

Layer = nn.Conv2d | nn.Linear

AffineMap = tuple[Tensor, Tensor]
"""Affine map of the channels, in float64 on the CPU: kernel [C, C, k, k] (k is 1 or 3) and bias [C]."""


class FoldResult(NamedTuple):
    """Result of folding one fossilized seed."""

    slot: str
    target_layer: str | None
    """Name of the layer that now contains the seed; None: the seed is unchanged."""
    reason: str
    """Reason why the seed could not be folded; empty if it was."""


def fold(network: nn.Module, example_input: ExampleInput) -> list[FoldResult]:
    """Fold the fossilized seeds of `network` into its layers, in place, where possible; their slots become empty.

    Each fold is checked: if it changes the outputs on the example by more than rounding (because the neighbour's output
    is also used elsewhere, for example), it is undone. Optimizers are not updated: create a new one to train further.
    The check misses operations that are active only in training and are not modules, such as `F.dropout`.

    Args:
        network: Network with slots.
        example_input: Input of the network; random numbers reveal more than zeros.
    """
    fossilized = [slot for slot in slots_of(network).values() if slot.stage is Stage.FOSSILIZED and slot.is_judged]
    with evaluation_mode(network), torch.no_grad():
        return [_fold(network, slot, example_input) for slot in fossilized]


def _fold(network: nn.Module, slot: SeedSlot, example: ExampleInput) -> FoldResult:
    """Try each candidate; keep the first that does not change the outputs, undo the others."""
    affine = affine_map_of(slot)
    if affine is None:
        return FoldResult(slot.name, None, f"{slot.blueprint} is not an affine map of its input")

    def outputs() -> list[Tensor]:
        return [x for x in iter_tensors(call_network(network, example)) if x.is_floating_point()]

    reference = outputs()
    if not reference or not all(x.isfinite().all() for x in reference):
        return FoldResult(slot.name, None, "the network gives no finite floating-point output to check a fold by")
    slot.stage = Stage.DORMANT  # switches the seed off, to measure its effect
    effect = max_difference(outputs(), reference)
    slot.stage = Stage.FOSSILIZED
    allowed = max(EFFECT_TOLERANCE * effect, OUTPUT_TOLERANCE * max(float(x.abs().max()) for x in reference))
    for name, layer, weight, bias in _candidates(network, slot, affine, example):
        if layer.bias is None and bias.any():
            continue  # a new bias would add a key to the host's state dict
        original, seed, folded_before = _weights(layer), slot.seed, slot.folded
        slot.seed, slot.stage = nn.Identity(), Stage.DORMANT
        if isinstance(layer, nn.Conv2d) and not any(layer is module for module in network.modules()):
            slot.folded = layer
        _set_weights(layer, weight, bias)
        if max_difference(outputs(), reference) <= allowed:
            slot.empty()
            return FoldResult(slot.name, name, "")
        _set_weights(layer, *original)
        slot.seed, slot.stage, slot.folded = seed, Stage.FOSSILIZED, folded_before
    return FoldResult(slot.name, None, "no linear layer before or behind the slot can take it")


def affine_map_of(slot: SeedSlot) -> AffineMap | None:
    """Return the map of the feature by the fossilized seed, with its shortcut; None if it is not affine."""
    if not isinstance(slot.seed, Residual):
        return None
    eye = torch.eye(slot.width, dtype=torch.float64)
    kernel, bias = eye[:, :, None, None], torch.zeros(slot.width, dtype=torch.float64)
    for layer in slot.seed.body:
        if not isinstance(layer, nn.Linear) and not (isinstance(layer, nn.Conv2d) and _keeps_size(layer)):
            return None
        weight, layer_bias = _weights(layer)
        weight = weight[:, :, None, None] if weight.ndim == 2 else weight
        # Of two 3×3 layers the map would be larger. A 3×3 layer pads with zeros, so it would not see the bias of a
        # pointwise layer before it at the border.
        if weight.shape[-1] > 1 and (kernel.shape[-1] > 1 or bias.any()):
            return None
        kernel = torch.einsum("oikl,ijmn->ojkmln", weight, kernel).flatten(4, 5).flatten(2, 3)
        bias = torch.einsum("oikl,i->o", weight, bias) + layer_bias
    centre = kernel.shape[-1] // 2
    kernel[:, :, centre, centre] += eye
    return kernel, bias


def _keeps_size(conv: nn.Conv2d) -> bool:
    size = conv.kernel_size[0]
    return (
        conv.kernel_size in ((1, 1), (3, 3))
        and conv.padding == (size // 2, size // 2)
        and conv.stride == conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
    )


def _candidates(
    network: nn.Module, slot: SeedSlot, affine: AffineMap, example: ExampleInput
) -> Iterator[tuple[str, Layer, Tensor, Tensor]]:
    """Yield the layers into which the seed can perhaps be merged, by name, with the merged weight and bias.

    The caller checks each on the outputs. First come those before the slot, then those after it (neither adds a layer),
    then a new convolution in the slot.
    """
    kernel, shift = affine
    before, after = _neighbours(network, slot, example)
    if slot.folded is not None:  # the slot's input passes through this layer before the seed
        before = {slot.name: slot.folded}
    if kernel.shape[-1] == 1:
        matrix = kernel[:, :, 0, 0]
        for name, layer in before.items():
            if getattr(layer, "groups", 1) == 1:
                weight, bias = _weights(layer)
                yield name, layer, torch.einsum("oc,c...->o...", matrix, weight), matrix @ bias + shift
        for name, layer in after.items():
            is_padded = isinstance(layer, nn.Conv2d) and layer.padding not in ((0, 0), "valid")
            # The layer pads the seed's output with zeros; after the fold the padding would get the seed's bias, too.
            if getattr(layer, "groups", 1) == 1 and not (is_padded and shift.any()):
                weight, bias = _weights(layer)
                merged = torch.einsum("oc...,cd->od...", weight, matrix)
                yield name, layer, merged, bias + torch.einsum("oc...,c->o", weight, shift)
    if slot.layout == "image" and slot.folded is None:
        yield slot.name, new_folded(slot, kernel.shape[-1]), kernel, shift


def _weights(layer: Layer) -> tuple[Tensor, Tensor]:
    """Return weight and bias in float64 on the CPU; zeros for a missing bias."""
    bias = layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
    weight, bias = (tensor.detach().to("cpu", torch.float64, copy=True) for tensor in (layer.weight, bias))
    return weight, bias


def _set_weights(layer: Layer, weight: Tensor, bias: Tensor) -> None:
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.copy_(bias)


def _neighbours(network: nn.Module, slot: SeedSlot, example: ExampleInput) -> tuple[dict[str, Layer], dict[str, Layer]]:
    """Return by name the linear layers whose output is the slot's input, and those whose input is the slot's output."""
    layer_type = nn.Conv2d if slot.layout == "image" else nn.Linear
    slot_tensors: list[Tensor] = []  # input and output of the slot
    calls: dict[str, tuple[Layer, Any, Any]] = {}  # by name: layer, input and output
    passed_on: list[Any] = []  # tensors that a layer returned unchanged
    inside = set(slot.modules())

    def make_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = [*args, *kwargs.values()]
            if isinstance(module, layer_type):
                calls[name] = module, given[0], output
            elif not isinstance(module, PASS_THROUGH_LAYERS) and not list(module.children()):
                passed_on.extend(x for x in given if x is output)

        return hook

    def record_slot(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        slot_tensors.extend((args[0], output))

    with ExitStack() as hooks:
        hooks.callback(slot.register_forward_hook(record_slot).remove)
        for name, module in network.named_modules():
            if module not in inside:
                # Runs before all other hooks, because the hook of an attached slot changes the output.
                hooks.callback(module.register_forward_hook(make_hook(name), prepend=True, with_kwargs=True).remove)
        call_network(network, example)
    if len(slot_tensors) != 2:  # a slot that runs several times has no unique neighbours
        return {}, {}
    entering, leaving = (None if any(x is one for x in passed_on) else one for one in slot_tensors)
    before = {name: layer for name, (layer, _, output) in calls.items() if output is entering}
    return before, {name: layer for name, (layer, given, _) in calls.items() if given is leaving}
