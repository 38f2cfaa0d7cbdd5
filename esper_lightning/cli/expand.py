"""Block expansion of a trained network of transformers, folder to folder, one file of weights at a time."""

import copy
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from esper_lightning.growth.blocks import BlockFields, errors_of, find_blocks, numbered
from esper_lightning.growth.residual import are_equal, branch_ends, outputs
from esper_lightning.growth.stack import check_options, set_to_zero
from esper_lightning.runtime.console import print_status
from esper_lightning.runtime.nested import ExampleInput

INDEX = "model.safetensors.index.json"
"""File that names the file of each tensor, where there are several."""

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}
"""Types of files with weights. Only safetensors are read, and none is copied as it is."""


def expand(
    folder: str, *, blocks: str, out: str, every: int = 4, zero: Sequence[str] = (), trust_remote_code: bool = False
) -> None:
    """Add blocks to a trained network of transformers that change none of its outputs until they are trained.

    Args:
        folder: Folder with config.json and safetensors, as `save_pretrained` writes it.
        blocks: Name of the list of blocks in the network, as `model.layers`.
        out: Folder to write, for `from_pretrained`; it must not exist.
        every: Number of blocks behind which a copy of the last of them is added.
        zero: Names, or ends of names, of the last layer of each residual branch. Empty: they are found by trial on a
            network with two blocks, random weights and a small input.
        trust_remote_code: Whether code in the folder may run, where the class of the network is not in transformers.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("expand: transformers is missing; pip install 'esper-lightning[hf]'") from None
    source, target = Path(folder), Path(out)
    if target.exists():
        raise ValueError(f"expand: {out!r} exists already; name another folder in --out")
    files = {source / "model.safetensors"}  # transformers prefers it to several files
    if not (source / "model.safetensors").is_file() and (source / INDEX).is_file():
        files = {source / name for name in json.loads((source / INDEX).read_text())["weight_map"].values()}
    missing = [path.name for path in sorted({source / "config.json", *files}) if not path.is_file()]
    if missing:
        raise ValueError(f"expand: {folder!r} lacks {', '.join(missing)}; write it by save_pretrained")
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    network_class: Any = getattr(transformers, (config.architectures or [""])[0], None)
    auto_class = next(iter(getattr(config, "auto_map", {}).keys() - {"AutoConfig"}), None)  # for code in the folder
    if network_class is None and auto_class is None:
        raise ValueError(f"expand: {source / 'config.json'} names no class of transformers in architectures")
    with torch.device("meta"):  # without weights
        if network_class is None:
            network = getattr(transformers, str(auto_class)).from_config(config, trust_remote_code=trust_remote_code)
        else:
            network = network_class(config)
    with errors_of("expand"):
        found = find_blocks(network, blocks)
    count, fields = len(found.blocks), BlockFields(found)
    if not 1 <= every <= count:
        raise ValueError(f"expand: every must be 1 to {count}, the number of blocks, got {every}")
    # Source of each block of the new list: the present block that it is, or is a copy of.
    order = found.whole_order([i for i in range(count) for _ in range(2 if (i + 1) % every == 0 else 1)])

    def build(depth: int) -> Any:
        """Return a network with so many blocks and random weights."""
        fields.set_counts(found.whole_order([0] * depth))
        return type(network)(copy.deepcopy(network.config))

    small, deeper = build(2), build(3)
    example = _example(small)
    with errors_of("expand"):
        if not zero and example is not None:
            zero = branch_ends(small, find_blocks(small, blocks).blocks[0], example)
        elif not zero:
            raise ValueError(
                f"{type(network).__name__} takes {network.main_input_name}, for which there is no small input; name "
                f"the last layer of each residual branch in --zero"
            )
        check_options(find_blocks(small, blocks).blocks, order="stack", new="zero", state="copy", zero=list(zero))
        _check_outputs(small, deeper, blocks, zero, example)
    list_name, zeroed = _names_in_files(small, deeper, blocks, zero)
    del small, deeper
    fields.set_counts(order)
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        shutil.copytree(source, draft, ignore=_left_out)
        names = numbered(found.modules, len(order))
        new_names: dict[str, list[str]] = {names[i]: [] for i in order}
        for name, i in zip(names, order, strict=True):
            new_names[names[i]].append(name)
        _write_weights(sorted(files), draft, list_name, new_names=new_names, zero=zeroed)
        network.config.save_pretrained(draft)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    copies = [i for i, source_index in enumerate(order) if source_index in order[:i]]
    print_status(
        f"written to {out}: {len(order)} blocks; {', '.join(map(str, copies))} are new, and return their input until "
        f"{', '.join(zero)} are trained"
    )


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return which files and folders of a folder are not copied: weights, folders with weights, hidden ones."""
    left_out = {name for name in names if name == INDEX or name.startswith(".")}
    for path in (Path(folder, name) for name in names):
        if any(file.suffix in WEIGHTS for file in (path, *path.rglob("*"))):
            left_out.add(path.name)
    return left_out


def _check_outputs(small: Any, deeper: Any, blocks: str, zero: Sequence[str], example: ExampleInput | None) -> None:
    """Raise ValueError if a new block changes an output of a network with two blocks and random weights.

    The new one is a copy of the first block, so that the second block has another index. Without an example, a line
    says that outputs are not compared.

    Args:
        small: Network with two blocks. Its weights change.
        deeper: Network of the same class and settings with three blocks, whose weights are replaced.
        blocks: Name of the list of blocks.
        zero: Names of the layers at zero in the new block.
        example: Input of the networks, if there is one.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # a parameter that is zero or one in every fresh network would hide a difference
        for parameter in small.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    found, grown = find_blocks(small, blocks), find_blocks(deeper, blocks)
    outside = {name: x for name, x in small.state_dict().items() if not name.startswith(f"{found.name}.")}
    shapes = {(name, x.shape) for name, x in outside.items()}
    deeper_tensors = deeper.state_dict().items()
    differing = shapes ^ {(name, x.shape) for name, x in deeper_tensors if not name.startswith(f"{found.name}.")}
    if differing:
        raise ValueError(
            f"expand: with another number of blocks {type(small).__name__} has another {min(differing)[0]}, outside of "
            f"them, so that a copy of blocks does not expand it"
        )
    deeper.load_state_dict(outside, strict=False)
    for block, source in zip(grown.modules, found.whole_order([0, 0, 1]), strict=True):
        block.load_state_dict(found.modules[source].state_dict())
    set_to_zero(grown.blocks[1], zero)
    if example is None:
        print_status(f"expand: there is no small input for {type(small).__name__}; compare its outputs yourself")
    elif not are_equal(outputs(small, example), outputs(deeper, example)):
        raise ValueError(
            f"expand: {type(small).__name__} with random weights returns other outputs with a new block whose "
            f"{', '.join(zero)} are zero; its blocks depend on their index or number, or --zero lacks a layer"
        )


def _names_in_files(small: Any, deeper: Any, blocks: str, zero: Sequence[str]) -> tuple[str, set[str]]:
    """Return the name of a list of blocks in files of weights, and the names in a block of the tensors to set to zero.

    transformers may write other names than the network has, and joined or split parameters. So a network with two
    blocks and one with three are written, with zeros in the layers `zero` alone.
    """
    written: list[dict[str, bool]] = []  # for each network, whether a tensor of its files is zero, by name
    for network in (small, deeper):
        found = find_blocks(network, blocks)
        for parameter in network.parameters():
            nn.init.ones_(parameter)
        for block in found.blocks:
            set_to_zero(block, zero)
        is_zero: dict[str, bool] = {}
        with TemporaryDirectory() as folder:
            network.save_pretrained(folder)
            for file in Path(folder).glob("*.safetensors"):
                is_zero |= {key: not bool(tensor.any()) for key, tensor in load_file(file).items()}
        written.append(is_zero)
    is_zero, is_zero_deeper = written
    names = numbered(found.modules, len(found.modules))
    # The last block of the list is new in the deeper network; its tensors are called as those of the last one before.
    *_, last_before, last = names
    list_names = set()
    for key in is_zero_deeper.keys() - is_zero.keys():
        parts = key.split(".")
        for i in (i for i, part in enumerate(parts) if part == last):
            if ".".join([*parts[:i], last_before, *parts[i + 1 :]]) in is_zero:
                list_names.add(".".join(parts[:i]))
    (list_name,) = list_names
    prefix = f"{list_name}.{names[found.skip_first]}."
    in_block = {key.removeprefix(prefix): empty for key, empty in is_zero_deeper.items() if key.startswith(prefix)}
    return list_name, {name for name, empty in in_block.items() if empty}


def _write_weights(
    files: Sequence[Path], folder: Path, blocks: str, *, new_names: Mapping[str, list[str]], zero: set[str]
) -> None:
    """Copy files of weights to a folder, with more blocks.

    `new_names` are, by the name of each present block, its own new name and the names of its copies, whose tensors
    `zero` are set to zero. Raises ValueError if the files hold other blocks, or lack a tensor of `zero`.
    """
    parts = blocks.split(".")  # files may leave out the first ones: `h.0` stands for `transformer.h.0`
    list_names = "|".join(re.escape(".".join(parts[i:])) for i in range(len(parts)))
    in_block = re.compile(rf"({list_names})\.([^.]+)\.(.+)")
    tensors_of_block: dict[str, set[str]] = {}
    file_of_tensor: dict[str, str] = {}
    size = 0  # of all tensors in bytes
    for file in files:
        tensors: dict[str, Tensor] = {}
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
            for key in opened.keys():  # noqa: SIM118  # it is no mapping
                tensor, match = opened.get_tensor(key), in_block.fullmatch(key)
                if match is None or match[2] not in new_names:
                    tensors[key] = tensor
                    continue
                list_name, block, name = match.groups()
                tensors_of_block.setdefault(block, set()).add(name)
                new_name, *copies = new_names[block]
                tensors[f"{list_name}.{new_name}.{name}"] = tensor
                fill = torch.zeros_like if name in zero else torch.clone
                tensors |= {f"{list_name}.{copied}.{name}": fill(tensor) for copied in copies}
        save_file(tensors, folder / file.name, metadata)
        file_of_tensor |= dict.fromkeys(tensors, file.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    copied_blocks = [block for block, names in new_names.items() if len(names) > 1]
    if tensors_of_block.keys() != new_names.keys() or not all(zero <= tensors_of_block[b] for b in copied_blocks):
        raise ValueError(
            f"expand: the files do not hold blocks {', '.join(new_names)} of {blocks!r} with "
            f"{', '.join(sorted(zero))}; load them by from_pretrained and write them by save_pretrained"
        )
    index = files[0].with_name(INDEX)
    if index.is_file():
        metadata = json.loads(index.read_text())["metadata"] | {"total_size": size}
        text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(file_of_tensor.items()))}, indent=2)
        (folder / INDEX).write_text(f"{text}\n")


def _example(network: Any) -> dict[str, Tensor] | None:
    """Return a small input for a network of transformers; None for inputs other than text and images."""
    if network.main_input_name == "pixel_values":
        size = network.config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.randn(1, network.config.num_channels, height, width)}
    return network.dummy_inputs if network.main_input_name in ("input_ids", "encoder_outputs") else None
