"""Grown networks as files: saved with all that grew, folded, or exported to formats that run without this package.

A fossilized seed of linear layers only is an affine map M·x + b of the channels (with a 3×3 kernel for `conv_light`).
`fold` merges it into a linear layer directly before or after the slot. Otherwise a convolution and its shortcut become
one convolution in the slot (https://arxiv.org/abs/2101.03697).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from esper_lightning.growth.attach import AttachedSlots, attach_from_state_dict
from esper_lightning.growth.blueprints import Residual, suggest_name
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import SeedSlot, new_folded
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.nested import (
    ExampleInput,
    call_network,
    copy_module,
    evaluation_mode,
    iter_tensors,
    max_difference,
)
from esper_lightning.runtime.serialization import replace_file

Format = Literal["pt2", "onnx"]

SUFFIXES: dict[Format, str] = {"pt2": ".pt2", "onnx": ".onnx"}  # suffix of the file of each format
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # packages of the extra [onnx]

EXPORT_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError)
"""Exceptions that torch raises for what it cannot trace; its own classes derive from the first."""

TOLERANCE = 1e-4
"""Largest accepted difference of an output, relative to the largest output: other kernels round differently."""


def save(network: nn.Module, path: str | Path) -> None:
    """Write a network's state dict to one safetensors file, which replaces an earlier one atomically.

    Raises ValueError if `path` is a folder, or if the network has state that is no tensor.
    """
    path, state = _file_path(path, "grown.safetensors"), network.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}; only networks whose state is tensors can be saved")
    # Copies, because a file cannot hold tensors that share memory (tied weights).
    tensors = {name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    content = safetensors.torch.save(tensors)
    replace_file(path, lambda draft: draft.write_bytes(content))


def load(network: nn.Module, path: str | Path) -> None:
    """Load the grown network that `save` wrote into `network`, which has the same architecture before growth.

    Slots that were attached are attached again if the network lacks them.

    Raises ValueError, and changes nothing, if the file is missing, damaged, or of another network.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no file {str(path)!r}; name one that growth.save has written")
    try:
        state = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None
    for target in (copy_module(network), network):  # a file that does not fit fails on the copy
        try:
            attach_from_state_dict(target, state)
            target.load_state_dict(state)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} is of another network: {reason:.300}") from None


def check_format(to: Format) -> None:
    """Raise ValueError if a format is unknown, or if a package that writes it is missing."""
    if to not in SUFFIXES:
        raise ValueError(f"unknown format {to!r}; {suggest_name(to, list(SUFFIXES))}")
    if to == "onnx" and (missing := [name for name in ONNX_PACKAGES if find_spec(name) is None]):
        raise ValueError(f"to onnx needs the extra [onnx] of this package: pip install {' '.join(missing)}")


def export(network: nn.Module | ExportedProgram, inputs: Tensor, path: str | Path, to: Format) -> float:
    """Write a network to a file of another format, and check that the file gives the same outputs.

    Args:
        network: Network that takes one tensor and returns tensors, or a program of `torch.export`. A network is
            exported in evaluation mode, for batches of any size, on the CPU.
        inputs: Real inputs, at least two, on which the outputs are compared.
        path: File to write. It is replaced in one step, and only if the check is passed.
        to: Format. pt2: a program of `torch.export`, which `torch.export.load` runs without the network's code. onnx:
            a model of ONNX, for onnxruntime and others.

    Returns the largest difference of an output from those of the network.

    Raises ValueError, in one line, if a package for the format is missing, if there are too few inputs, if `path` is a
    folder, if the network cannot be exported, or if the file gives other outputs.
    """
    check_format(to)
    if len(inputs) < 2:
        raise ValueError(f"an export is checked on at least 2 inputs, got {len(inputs)}; give more")
    path, inputs = _file_path(path, f"network{SUFFIXES[to]}"), inputs.cpu()
    given = network if isinstance(network, ExportedProgram) else None
    network = network.module() if isinstance(network, ExportedProgram) else copy_module(network).cpu().eval()
    with torch.no_grad():
        expected = list(iter_tensors(network(inputs)))
        largest_output = max((float(output.abs().max()) for output in expected if output.numel()), default=0.0)
        difference = 0.0

        def write_and_check(draft: Path) -> None:
            nonlocal difference
            try:
                batches = ({0: torch.export.Dim("batch")},)
                program = given or torch.export.export(network, (inputs,), dynamic_shapes=batches)
                run_file = (_write_pt2 if to == "pt2" else _write_onnx)(program, draft)
            except EXPORT_ERRORS as error:
                cause: BaseException = error
                while cause.__cause__ is not None:  # the first one names an operation without a form in ONNX
                    cause = cause.__cause__
                reason = (str(cause).strip().splitlines() or [""])[0]
                raise ValueError(f"the network cannot be exported: {type(cause).__name__}: {reason}") from error
            difference = max_difference(list(iter_tensors(run_file(inputs))), expected)
            if not isfinite(difference) or difference > TOLERANCE * largest_output:
                raise ValueError(
                    f"the exported network gives other outputs: {difference:.3g} off, largest output "
                    f"{largest_output:.3g}; "
                    f"the network may do what {to} cannot hold, such as choosing its path by the data"
                )

        replace_file(path, write_and_check)
    return difference


def _file_path(path: str | Path, example: str) -> Path:
    """Return `path`, and create its folder. Raises ValueError, which suggests `example`, if it is a folder itself."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file, such as {path / example}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write_pt2(program: ExportedProgram, path: Path) -> Callable[[Tensor], Any]:
    with path.open("wb") as file:
        torch.export.save(program, file)
    with path.open("rb") as file:
        return torch.export.load(file).module()


def _write_onnx(program: ExportedProgram, path: Path) -> Callable[[Tensor], Any]:
    onnx = torch.onnx.export(program, dynamo=True, verbose=False)
    assert onnx is not None, "dynamo=True returns one"
    path.write_bytes(onnx.model_proto.SerializeToString())
    session = import_module("onnxruntime").InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: [torch.from_numpy(output) for output in session.run(None, {name: x.numpy()})]


# Folding.

OUTPUT_TOLERANCE = 2e-6
"""Change of the outputs, relative to the largest output, that is always accepted as float32 rounding."""

EFFECT_TOLERANCE = 1e-4
"""Change of the outputs, relative to the effect of the seed, that is accepted as rounding. A wrong fold changes the
outputs about as much as the seed does."""

PASS_THROUGH_LAYERS = (nn.Identity, nn.Flatten, AttachedSlots)
"""Layers that may return their input unchanged, in training too; Dropout does so only in evaluation mode."""

Layer = nn.Conv2d | nn.Linear


class AffineMap(NamedTuple):
    """Affine map of the channels of a feature, in float64 on the CPU."""

    kernel: Tensor  # [C, C, k, k], where k is 1 or 3
    bias: Tensor  # [C]


class FoldCandidate(NamedTuple):
    """A layer into which a seed may be merged, with the weights that it then has, in float64 on the CPU."""

    name: str
    layer: Layer
    weight: Tensor
    bias: Tensor


class FoldResult(NamedTuple):
    """Result of folding one fossilized seed."""

    slot: str
    target_layer: str | None  # name of the layer that now contains the seed; None: the seed is unchanged
    reason: str  # reason why the seed could not be folded; empty if it was


def fold(network: nn.Module, example_input: ExampleInput) -> list[FoldResult]:
    """Fold the fossilized seeds of `network` into its layers, in place, where possible; their slots become empty.

    Each fold is checked: if it changes the outputs on the example by more than rounding (because the neighbour's output
    is also used elsewhere, for example), it is undone. Optimizers are not updated: create a new one to train further.
    The check misses operations that are active only in training and are not modules, such as `F.dropout`.

    Args:
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
    for name, layer, weight, bias in _candidates(network, slot, affine, example=example):
        if layer.bias is None and bias.any():
            continue  # a new bias would add a key to the host's state dict
        original, seed, folded_before = _weights(layer), slot.seed, slot.folded
        slot.seed, slot.stage = nn.Identity(), Stage.DORMANT
        if isinstance(layer, nn.Conv2d) and not any(layer is module for module in network.modules()):
            slot.folded = layer  # the candidate is a new layer
        _set_weights(layer, weight, bias)
        if max_difference(outputs(), reference) <= allowed:
            slot.empty()
            return FoldResult(slot.name, name, "")
        _set_weights(layer, *original)
        slot.seed, slot.stage, slot.folded = seed, Stage.FOSSILIZED, folded_before
    return FoldResult(slot.name, None, "no linear layer before or behind the slot can take it")


def affine_map_of(slot: SeedSlot) -> AffineMap | None:
    """Return the affine map that a seed of linear layers and its shortcut are together; None if they are none."""
    if not isinstance(slot.seed, Residual):
        return None
    eye = torch.eye(slot.width, dtype=torch.float64)
    kernel, bias = eye[:, :, None, None], torch.zeros(slot.width, dtype=torch.float64)
    for layer in slot.seed.body:
        if not isinstance(layer, nn.Linear) and not (isinstance(layer, nn.Conv2d) and _keeps_size(layer)):
            return None
        weight, layer_bias = _weights(layer)
        weight = weight[:, :, None, None] if weight.ndim == 2 else weight
        # Two 3×3 layers have a 5×5 kernel together, which no layer here can take. And a 3×3 layer pads with zeros, so
        # at the border it does not see the bias of a pointwise layer before it.
        if weight.shape[-1] > 1 and (kernel.shape[-1] > 1 or bias.any()):
            return None
        kernel = torch.einsum("oikl,ijmn->ojkmln", weight, kernel).flatten(4, 5).flatten(2, 3)
        bias = torch.einsum("oikl,i->o", weight, bias) + layer_bias
    centre = kernel.shape[-1] // 2
    kernel[:, :, centre, centre] += eye
    return AffineMap(kernel, bias)


def _keeps_size(conv: nn.Conv2d) -> bool:
    """Return True for a plain 1×1 or 3×3 convolution whose output has the size of its input."""
    size = conv.kernel_size[0]
    return (
        conv.kernel_size in ((1, 1), (3, 3))
        and conv.padding == (size // 2, size // 2)
        and conv.stride == conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
    )


def _candidates(
    network: nn.Module, slot: SeedSlot, affine: AffineMap, *, example: ExampleInput
) -> Iterator[FoldCandidate]:
    """Yield the layers into which the seed may be merged.

    The caller checks each on the outputs. First come those before the slot, then those after it (neither adds a layer),
    then a new convolution in the slot.
    """
    kernel, shift = affine.kernel, affine.bias
    before, after = _neighbours(network, slot, example)
    if slot.folded is not None:  # the slot's input passes through this layer before the seed
        before = {slot.name: slot.folded}
    if kernel.shape[-1] == 1:
        matrix = kernel[:, :, 0, 0]
        for name, layer in before.items():
            if getattr(layer, "groups", 1) == 1:
                weight, bias = _weights(layer)
                merged = torch.einsum("oc,c...->o...", matrix, weight)
                yield FoldCandidate(name, layer, merged, matrix @ bias + shift)
        for name, layer in after.items():
            is_padded = isinstance(layer, nn.Conv2d) and layer.padding not in ((0, 0), "valid")
            # The layer pads the seed's output with zeros; after the fold the padding would get the seed's bias, too.
            if getattr(layer, "groups", 1) == 1 and not (is_padded and shift.any()):
                weight, bias = _weights(layer)
                merged = torch.einsum("oc...,cd->od...", weight, matrix)
                yield FoldCandidate(name, layer, merged, bias + torch.einsum("oc...,c->o", weight, shift))
    if slot.layout == "image" and slot.folded is None:
        yield FoldCandidate(slot.name, new_folded(slot, kernel.shape[-1]), kernel, shift)


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
    inputs: dict[str, Any] = {}  # of each linear layer, by its name
    outputs: dict[str, Any] = {}
    layers: dict[str, Layer] = {}
    passed_on: list[Any] = []  # tensors that a layer returned unchanged
    inside = set(slot.modules())

    def make_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = [*args, *kwargs.values()]
            if isinstance(module, layer_type):
                layers[name], inputs[name], outputs[name] = module, given[0], output
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
    # None: a layer that passes its input on in evaluation mode alone, such as Dropout, is between slot and neighbour.
    slot_input, slot_output = (None if any(x is tensor for x in passed_on) else tensor for tensor in slot_tensors)
    before = {name: layer for name, layer in layers.items() if outputs[name] is slot_input}
    return before, {name: layer for name, layer in layers.items() if inputs[name] is slot_output}
