"""Grown networks as files: saved with all that grew, or exported to formats that run without this package."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from esper_lightning.growth.attach import attach_from_state_dict
from esper_lightning.growth.blueprints import suggest_name
from esper_lightning.runtime.nested import copy_module, iter_tensors, max_difference
from esper_lightning.runtime.serialization import replace_durably, replace_file

Format = Literal["pt2", "onnx"]

SUFFIXES: dict[Format, str] = {"pt2": ".pt2", "onnx": ".onnx"}
"""Suffix of the file of each format."""

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

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
    replace_durably(path, lambda file: file.write(content))


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
    if to not in SUFFIXES:
        raise ValueError(f"unknown format {to!r}; {suggest_name(to, list(SUFFIXES))}")
    if to == "onnx" and (missing := [name for name in ONNX_PACKAGES if find_spec(name) is None]):
        raise ValueError(f"to onnx: packages are missing; install them: pip install {' '.join(missing)}")
    if len(inputs) < 2:
        raise ValueError(f"an export is checked on at least 2 inputs, got {len(inputs)}; give more")
    path, inputs = _file_path(path, f"network{SUFFIXES[to]}"), inputs.cpu()
    if isinstance(network, ExportedProgram):
        program, network = network, network.module()
    else:
        network = copy_module(network).cpu().eval()
        program = _export_program(network, inputs)
    with torch.no_grad():
        expected = list(iter_tensors(network(inputs)))
        largest_output = max((float(output.abs().max()) for output in expected if output.numel()), default=0.0)
        difference = 0.0

        def write_and_check(draft: Path) -> None:
            nonlocal difference
            run_file = (_write_pt2 if to == "pt2" else _write_onnx)(program, draft)
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
    """Return `path` as a Path, and create its folder.

    Raises ValueError if it is a folder itself; `example` is the file name that the message suggests.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file, such as {path / example}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _export_program(network: nn.Module, inputs: Tensor) -> ExportedProgram:
    """Return the program of a network in its present mode, for batches of any size."""
    try:
        return torch.export.export(network, (inputs,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except EXPORT_ERRORS as error:
        raise _not_exported(error) from error


def _write_pt2(program: ExportedProgram, path: Path) -> Callable[[Tensor], Any]:
    with path.open("wb") as file:
        torch.export.save(program, file)
    with path.open("rb") as file:
        return torch.export.load(file).module()


def _write_onnx(program: ExportedProgram, path: Path) -> Callable[[Tensor], Any]:
    try:
        model = torch.onnx.export(program, dynamo=True, verbose=False)
    except EXPORT_ERRORS as error:  # an operation without a form in ONNX, which the first cause names
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise _not_exported(cause) from error
    assert model is not None, "dynamo=True returns one"
    path.write_bytes(model.model_proto.SerializeToString())
    session = import_module("onnxruntime").InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: [torch.from_numpy(output) for output in session.run(None, {name: x.numpy()})]


def _not_exported(error: BaseException) -> ValueError:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return ValueError(f"the network cannot be exported: {type(error).__name__}: {first_line}")
