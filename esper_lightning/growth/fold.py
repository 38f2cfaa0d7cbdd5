"""Folding of fossilized seeds into the host's layers: the same outputs from fewer layers.

A seed of style "add" that consists of linear layers only is an affine map M·x + b of the channels (with a 3×3 kernel
for `conv_light`). It can be merged into a linear layer directly before or after the slot. Otherwise a convolution and
its shortcut become one convolution in the slot (https://arxiv.org/abs/2101.03697).
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import Residual
from esper_lightning.growth.attach import AttachedSlots
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.nested import ExampleInput, call_network, evaluation_mode, iter_tensors
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage

OUTPUT_TOLERANCE = 2e-6
"""Change of the outputs, relative to the largest output, that is always accepted as float32 rounding."""

EFFECT_TOLERANCE = 1e-4
"""Change of the outputs, relative to the effect of the seed, that is accepted as rounding. A wrong fold changes the
outputs about as much as the seed does."""

PASS_THROUGH_LAYERS = (nn.Identity, nn.Flatten, AttachedSlots)
"""Layers that may return their input unchanged, in training too; Dropout does so only in evaluation mode."""

Layer = nn.Conv2d | nn.Linear


class FoldResult(NamedTuple):
    """Result of folding one fossilized seed."""

    slot: str
    target_layer: str | None
    """Name of the layer that now contains the seed; None: the seed is unchanged."""
    reason: str
    """Reason why the seed could not be folded; empty if it was."""


class AffineMap(NamedTuple):
    """Affine map of the channels, in float64: `kernel` [C, C, k, k] (k is 1 or 3) and `bias` [C]."""

    kernel: Tensor
    bias: Tensor

    @property
    def is_pointwise(self) -> bool:
        return self.kernel.shape[-1] == 1

    @property
    def matrix(self) -> Tensor:  # [C, C]
        return self.kernel[:, :, 0, 0]


def affine_map_of(slot: SeedSlot) -> AffineMap | None:
    """Return the map of the feature by the fossilized seed, with shortcut and alpha; None if it is not affine."""
    seed, alpha = slot.seed, slot.ramp.target
    if slot.style != "add" or not isinstance(seed, Residual):
        return None
    kernel = torch.eye(slot.width, dtype=torch.float64)[:, :, None, None]
    bias = torch.zeros(slot.width, dtype=torch.float64)
    for layer in seed.body:
        layer_map = _affine_map_of_layer(layer)
        if layer_map is None or (kernel.shape[-1] > 1 and not layer_map.is_pointwise):
            return None
        # The 3×3 layer pads with zeros, so it would not see the bias of a pointwise layer at the border.
        if not layer_map.is_pointwise and bias.any():
            return None
        kernel = torch.einsum("oikl,ijmn->ojkmln", layer_map.kernel, kernel).flatten(4, 5).flatten(2, 3)
        bias = torch.einsum("oikl,i->o", layer_map.kernel, bias) + layer_map.bias
    kernel, bias = alpha * kernel, alpha * bias
    centre = kernel.shape[-1] // 2
    kernel[:, :, centre, centre] += torch.eye(slot.width, dtype=torch.float64)
    return AffineMap(kernel, bias)


def _affine_map_of_layer(layer: nn.Module) -> AffineMap | None:
    if isinstance(layer, nn.Linear):
        weight, bias = _weights(layer)
        return AffineMap(weight[:, :, None, None], bias)
    if isinstance(layer, nn.Conv2d) and layer.groups == 1 and _keeps_size(layer):
        return AffineMap(*_weights(layer))
    return None


def _keeps_size(conv: nn.Conv2d) -> bool:
    kernel_size = conv.kernel_size[0]
    return (
        conv.kernel_size in ((1, 1), (3, 3))
        and conv.padding == (kernel_size // 2, kernel_size // 2)
        and conv.stride == conv.dilation == (1, 1)
        and conv.padding_mode == "zeros"
    )


def fold(network: nn.Module, example_input: ExampleInput) -> list[FoldResult]:
    """Fold the fossilized seeds of `network` into its layers, in place, where possible; their slots become empty.

    Each fold is checked: if it changes the outputs on the example by more than rounding (because the neighbour's output
    is also used elsewhere, for example), it is undone. Optimizers are not updated: create a new one to train further.
    The check misses operations that are active only in training and are not modules, such as `F.dropout`.

    Args:
        network: Network with slots.
        example_input: Input of the network; random numbers reveal more than zeros.
    """
    fossilized_slots = [slot for slot in slots_of(network).values() if slot.stage is Stage.FOSSILIZED]
    with evaluation_mode(network), torch.no_grad():
        return [_fold(network, slot, example_input) for slot in fossilized_slots]


class _FoldCandidate(NamedTuple):
    """Layer that a seed could be folded into, and the weights it would have after the fold."""

    target_layer: str
    layer: Layer
    weight: Tensor
    bias: Tensor
    replaces_seed: bool = False
    """True if the layer is a new one that takes the seed's position in the slot."""


def _fold(network: nn.Module, slot: SeedSlot, example: ExampleInput) -> FoldResult:
    """Try each candidate; keep the first that does not change the outputs, undo the others."""
    affine = affine_map_of(slot)
    if affine is None:
        return FoldResult(slot.name, None, f"{slot.blueprint} ({slot.style}) is not an affine map of its input")
    reference = _outputs(network, example)
    if not reference:
        return FoldResult(
            slot.name, None, "the network gives no floating-point output by which a fold could be checked"
        )
    slot.stage = Stage.DORMANT  # switches the seed off, to measure its effect
    effect = _max_difference(_outputs(network, example), reference)
    slot.stage = Stage.FOSSILIZED
    for candidate in _fold_candidates(network, slot, affine, example=example):
        if candidate.layer.bias is None and candidate.bias.any():
            continue  # a new bias would add a key to the host's state dict
        original_weights = _weights(candidate.layer)
        seed, folded_before = slot.seed, slot.folded
        slot.seed, slot.stage = nn.Identity(), Stage.DORMANT
        if candidate.replaces_seed:
            assert isinstance(candidate.layer, nn.Conv2d), "made by layer_for"
            slot.folded = candidate.layer
        _set_weights(candidate.layer, candidate.weight, candidate.bias)
        change = _max_difference(_outputs(network, example), reference)
        if change <= max(EFFECT_TOLERANCE * effect, OUTPUT_TOLERANCE * _max_finite(reference)):
            slot.empty()
            return FoldResult(slot.name, candidate.target_layer, "")
        _set_weights(candidate.layer, *original_weights)
        slot.seed, slot.stage, slot.folded = seed, Stage.FOSSILIZED, folded_before
    return FoldResult(slot.name, None, "no linear layer before or behind the slot can take it")


def _fold_candidates(
    network: nn.Module, slot: SeedSlot, affine: AffineMap, *, example: ExampleInput
) -> list[_FoldCandidate]:
    """Return the possible folds, in the order in which to try them.

    First into a layer before the slot, then into one after it (neither adds a layer), then into a new convolution in
    the slot.
    """
    before, after = _neighbours(network, slot, example)
    layer: Layer
    if slot.folded is not None:
        before = {slot.name: slot.folded}  # the slot's input passes through this layer before the seed
    candidates = []
    for name, layer in before.items():
        if affine.is_pointwise and getattr(layer, "groups", 1) == 1:
            weight, bias = _weights(layer)
            merged = torch.einsum("oc,c...->o...", affine.matrix, weight)
            candidates.append(_FoldCandidate(name, layer, merged, affine.matrix @ bias + affine.bias))
    for name, layer in after.items():
        is_padded = isinstance(layer, nn.Conv2d) and layer.padding not in ((0, 0), "valid")
        # The layer pads the seed's output with zeros; after the fold the padding would get the seed's bias, too.
        if affine.is_pointwise and getattr(layer, "groups", 1) == 1 and not (is_padded and affine.bias.any()):
            weight, bias = _weights(layer)
            merged = torch.einsum("oc...,cd->od...", weight, affine.matrix)
            candidates.append(
                _FoldCandidate(name, layer, merged, bias + torch.einsum("oc...,c->o", weight, affine.bias))
            )
    if slot.layout == "image" and slot.folded is None:
        candidates.append(
            _FoldCandidate(
                slot.name, slot.layer_for(affine.kernel.shape[-1]), affine.kernel, affine.bias, replaces_seed=True
            )
        )
    return candidates


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
    layers: dict[str, Layer] = {}  # those that ran, by name
    outputs_by_name: dict[str, Any] = {}
    inputs_by_name: dict[str, Any] = {}
    passed_on: list[Any] = []  # tensors that a layer returned unchanged
    slot_modules = set(slot.modules())
    modules = {name: module for name, module in network.named_modules() if module not in slot_modules}

    def make_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = [*args, *kwargs.values()]
            if isinstance(module, layer_type):
                layers[name], outputs_by_name[name], inputs_by_name[name] = module, output, given[0]
            elif (
                not isinstance(module, PASS_THROUGH_LAYERS)
                and not [*module.children()]
                and any(x is output for x in given)
            ):
                passed_on.append(output)

        return hook

    def record_slot(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        slot_tensors.extend((args[0], output))

    with ExitStack() as hooks:
        hooks.callback(slot.register_forward_hook(record_slot).remove)
        for name, module in modules.items():
            # Runs before all other hooks, because the hook of an attached slot changes the output.
            hooks.callback(module.register_forward_hook(make_hook(name), prepend=True, with_kwargs=True).remove)
        call_network(network, example)
    if len(slot_tensors) != 2:  # a slot that runs several times has no unique neighbours
        return {}, {}
    entering, leaving = (
        None if any(x is slot_tensor for x in passed_on) else slot_tensor for slot_tensor in slot_tensors
    )
    before = {name: layers[name] for name, tensor in outputs_by_name.items() if tensor is entering}
    after = {name: layers[name] for name, tensor in inputs_by_name.items() if tensor is leaving}
    return before, after


def _outputs(network: nn.Module, example: ExampleInput) -> list[Tensor]:
    return [output for output in iter_tensors(call_network(network, example)) if output.is_floating_point()]


def _max_finite(values: list[Tensor]) -> float:
    """Return the largest absolute value of all finite elements; 0 if there are none."""
    return max(float(value[value.isfinite()].abs().max()) if value.isfinite().any() else 0.0 for value in values)


def _max_difference(outputs: list[Tensor], reference: list[Tensor]) -> float:
    """Return the largest absolute difference of any element; infinity if non-finite elements differ or are NaN."""
    pairs = list(zip(outputs, reference, strict=True))
    for a, b in pairs:
        is_nonfinite = ~(a.isfinite() & b.isfinite())
        if not torch.equal(a[is_nonfinite], b[is_nonfinite]):
            return math.inf
    return _max_finite([a - b for a, b in pairs])
