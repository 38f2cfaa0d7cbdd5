"""Export of a grown network to files that run without this package, each checked on real inputs after it is written."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import suggest_name
from esper_lightning.growth.nested import iter_tensors
from esper_lightning.serialization.replace import replace_file

Format = Literal["pt2", "onnx", "state_dict"]

SUFFIXES: dict[Format, str] = {"pt2": ".pt2", "onnx": ".onnx", "state_dict": ".pt"}
"""Suffix of the file of each format."""

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

EXPORT_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError)
"""Exceptions that torch raises for what it cannot trace; its own classes derive from the first."""

TOLERANCE = 1e-4
"""Largest accepted difference of an output, relative to the largest output: other kernels round differently."""


def export(network: nn.Module, inputs: Tensor, path: str | Path, to: Format) -> float:
    """Write a network to a file of another format, and check that the file gives the same outputs.

    Args:
        network: Network that takes one tensor and returns tensors. It is exported in evaluation mode, for batches of
            any size, on the CPU.
        inputs: Real inputs, at least two, on which the outputs are compared.
        path: File to write. It is replaced in one step, and only if the check is passed.
        to: Format. pt2: a program of `torch.export`, which `torch.export.load` runs without the network's code. onnx:
            a model of ONNX, for onnxruntime and others. state_dict: weights with the records of what grew, for
            `torch.load` and `load_state_dict` of a network with the same slots.

    Returns the largest difference of an output from those of the network.

    Raises ValueError, in one line, if a package for the format is missing, if there are too few inputs, if `path` is a
    folder, if the network cannot be exported, or if the file gives other outputs.
    """
    if to not in get_args(Format):
        raise ValueError(f"unknown format {to!r}; {suggest_name(to, list(SUFFIXES))}")
    if to == "onnx" and (missing := [name for name in ONNX_PACKAGES if find_spec(name) is None]):
        raise ValueError(f"to onnx: packages are missing; install them: pip install {' '.join(missing)}")
    if len(inputs) < 2:
        raise ValueError(f"an export is checked on at least 2 inputs, got {len(inputs)}; give more")
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; name a file, such as {Path(path) / f'network{SUFFIXES[to]}'}")
    path, network, inputs = Path(path), deepcopy(network).cpu().eval(), inputs.cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        expected = _tensors(network(inputs))
        differences: list[float] = []

        def write_and_check(draft: Path) -> None:
            run = WRITERS[to](network, inputs, draft)
            differences.append(max_difference(_tensors(run(inputs)), expected))
            size = max((float(output.abs().max()) for output in expected if output.numel()), default=0.0)
            if not differences[-1] <= TOLERANCE * size:
                raise ValueError(
                    f"the exported network gives other outputs: {differences[-1]:.3g} off, largest output {size:.3g}; "
                    f"the network may do what {to} cannot hold, such as choosing its path by the data"
                )

        replace_file(path, write_and_check)
    return differences[-1]


def export_program(network: nn.Module, inputs: Tensor) -> torch.export.ExportedProgram:
    """Return the program of a network in its present mode, for batches of any size."""
    try:
        return torch.export.export(network, (inputs,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except EXPORT_ERRORS as error:
        raise _not_exported(error) from error


def _write_pt2(network: nn.Module, inputs: Tensor, path: Path) -> Callable[[Tensor], Any]:
    with path.open("wb") as file:
        torch.export.save(export_program(network, inputs), file)
    with path.open("rb") as file:
        return torch.export.load(file).module()


def _write_onnx(network: nn.Module, inputs: Tensor, path: Path) -> Callable[[Tensor], Any]:
    exported = export_program(network, inputs)
    try:
        program = torch.onnx.export(exported, dynamo=True, verbose=False)
    except EXPORT_ERRORS as error:  # an operation without a form in ONNX, which the first cause names
        raise _not_exported(_first_cause(error)) from error
    assert program is not None, "dynamo=True returns one"
    path.write_bytes(program.model_proto.SerializeToString())
    session = import_module("onnxruntime").InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: [torch.from_numpy(output) for output in session.run(None, {name: x.numpy()})]


def _write_state_dict(network: nn.Module, inputs: Tensor, path: Path) -> Callable[[Tensor], Any]:
    # Clones, because a view would be saved with all of the memory that it is a part of.
    state = {name: value.clone() for name, value in network.state_dict().items()}
    with path.open("wb") as file:  # the name alone would hide the reason if the disk is full
        torch.save(state, file)
    loaded = deepcopy(network)
    for parameter in loaded.parameters():
        parameter.zero_()
    loaded.load_state_dict(torch.load(path, weights_only=True))
    return loaded


WRITERS: Mapping[Format, Callable[[nn.Module, Tensor, Path], Callable[[Tensor], Any]]] = {
    "pt2": _write_pt2,
    "onnx": _write_onnx,
    "state_dict": _write_state_dict,
}
"""Functions that write a network to a file and return what runs the file."""


def max_difference(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest absolute difference of two lists of tensors; infinity if numbers or shapes differ."""
    if [output.shape for output in outputs] != [output.shape for output in expected]:
        return float("inf")
    pairs = zip(outputs, expected, strict=True)
    return max((float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def _tensors(outputs: Any) -> list[Tensor]:
    return list(iter_tensors(outputs))


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _not_exported(error: BaseException) -> ValueError:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return ValueError(f"the network cannot be exported: {type(error).__name__}: {first_line}")
