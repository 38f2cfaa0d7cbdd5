"""The command `export`: a grown network as a file that other programs run."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from torch import Tensor, nn

from esper_lightning.cli import PROGRAM
from esper_lightning.cli.parser import Parser
from esper_lightning.cli.trust import TRUST_OPTION, check_object, trusted_packages
from esper_lightning.console import print_status
from esper_lightning.errors import one_line_errors
from esper_lightning.evaluation.networks import (
    HOST_FILE,
    NETWORK_FILE,
    SAMPLES_FILE,
    load_host,
    read_description,
    read_samples,
)
from esper_lightning.growth.export import SUFFIXES, TOLERANCE, Format, export, max_difference
from esper_lightning.growth.saving import load
from esper_lightning.serialization.replace import make_folder
from esper_lightning.user_code import find_user_part

COMMAND = "export"

SOURCE_HELP = "Folder that `grow` or `evaluate --save_networks` has written, or a file of `growth.save`."
TO_HELP = """pt2: a program of torch.export, which runs without this package. onnx: a model of ONNX; needs the extra
[onnx]. state_dict: weights with the record of what grew, for a network with the same slots."""
OUT_HELP = (
    f"File to write. Without it: {Path(NETWORK_FILE).stem} in the folder, or the name of the file, with a suffix."
)
TRUST_HELP = "For a folder: packages of your own, with commas between them, that its host may be of."
NETWORK_HELP = "For a file: import path of a class or function that makes the network as it was before growth."
INPUTS_HELP = "For a file: safetensors file with real inputs of the network as the tensor `inputs`."


def export_parser() -> Parser:
    """Return the parser of the command's arguments."""
    parser = Parser(prog=f"{PROGRAM} {COMMAND}")
    parser.add_argument("source", type=str, help=SOURCE_HELP)
    parser.add_argument("--to", type=Format, required=True, help=TO_HELP)
    parser.add_argument("--out", type=str | None, default=None, help=OUT_HELP)
    parser.add_argument(TRUST_OPTION, type=str | None, default=None, help=TRUST_HELP)
    parser.add_argument("--network", type=str | None, default=None, help=NETWORK_HELP)
    parser.add_argument("--inputs", type=str | None, default=None, help=INPUTS_HELP)
    return parser


def run_export(args: Sequence[str]) -> None:
    """Run the command. Errors of the user end it with one line."""
    config = export_parser().parse_args(list(args))
    with one_line_errors():
        source = Path(config.source)
        network, inputs = (_from_folder if source.is_dir() else _from_file)(source, config)
        default = (source / NETWORK_FILE if source.is_dir() else source).with_suffix(SUFFIXES[config.to])
        path = default if config.out is None else Path(config.out)
        make_folder(path.parent)
        difference = export(network, inputs, path, config.to)
    print_status(f"written to {path}: on {len(inputs)} inputs its outputs differ by at most {difference:.2g}")


def _from_folder(folder: Path, config: Namespace) -> tuple[nn.Module, Tensor]:
    """Return the network of a folder and its samples."""
    for name in ("network", "inputs"):
        if config[name] is not None:
            raise ValueError(f"--{name} is for a file; a folder tells it itself, so leave it out")
    description = read_description(folder)
    host = check_object(folder / HOST_FILE, description["host"], trusted_packages(config.trust))
    samples = read_samples(folder / SAMPLES_FILE)
    network = load_host(folder, {**description, "host": {"init_args": {}, **host}})
    try:
        with torch.no_grad():
            outputs = network(samples["inputs"])
    except (RuntimeError, LookupError, TypeError, ValueError) as error:
        if find_user_part(error) is not None:
            raise
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{folder}: the network does not take the saved inputs: {reason:.300}") from error
    if "outputs" not in samples or max_difference([outputs], [samples["outputs"]]) > TOLERANCE * _size(outputs):
        raise ValueError(f"{folder}: the network gives other outputs than when it was saved; save it again")
    return network, samples["inputs"]


def _from_file(file: Path, config: Namespace) -> tuple[nn.Module, Tensor]:
    """Return the network of a file, made by a function that the user names, and the user's inputs."""
    if not file.exists():
        raise ValueError(f"there is no folder or file {str(file)!r}; name one with a grown network")
    if config.trust is not None:
        raise ValueError(f"{TRUST_OPTION} is for a folder; the network of a file is the one that you name by --network")
    for name in ("network", "inputs"):
        if config[name] is None:
            raise ValueError(f"{str(file)!r} does not tell what network it is of; give --network and --inputs")
    module, _, name = config.network.rpartition(".")
    try:
        network: Any = getattr(import_module(module), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"--network {config.network}: no network can be made by it: {error}") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"--network {config.network}: it made a {type(network).__name__}, not a network")
    load(network, file)
    return network.eval(), read_samples(Path(config.inputs))["inputs"]


def _size(outputs: Tensor) -> float:
    return float(outputs.abs().max()) if outputs.numel() else 0.0
