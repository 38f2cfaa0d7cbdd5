"""Safe loading of untrusted tensor files: no code is run, damage is detected, memory is limited by the file's size.

`torch.load(weights_only=True)` runs no code, but does not detect damaged tensors, and a file of a few bytes can make it
allocate any amount of memory.
"""

import pickle
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NOT_TENSORS = (
    RuntimeError,
    EOFError,
    OSError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    NotImplementedError,
    struct.error,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
"""Exceptions observed when reading a file of another kind, or when using its content."""

MAKERS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch Size|torch (?!Typed|Untyped)\w+Storage"
)
"""Globals that a pickle may refer to: all that state dicts need. Many of the others that torch allows allocate as much
memory as the file asks for."""

END = struct.Struct("<4s4H2LH")
"""Layout of the last record of a zip archive without a comment."""

MAX_DEPTH = 48
"""Maximum depth of nested containers: four times the depth of a checkpoint."""

MAX_COPIES = 4
"""Maximum total size of all tensors, as a multiple of the file size; above 1 because tied weights share memory."""

SMALLEST, LARGEST = -(2**63), 2**64 - 1
"""Range of integers that torch can represent."""


CPU = torch.device("cpu")


def read_tensors(path: Path, device: torch.device = CPU) -> Any:
    """Return the object that `torch.save` wrote to `path`. Raises ValueError unless it is undamaged, plain data."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist or is not a file")
    try:
        check_archive(path)
        content = torch.load(path, map_location=device, weights_only=True)
        check_content(content, path.stat().st_size)
    except NOT_TENSORS as error:
        reason = str(error).partition("\n")[0] if type(error) is ValueError else type(error).__name__
        raise ValueError(f"{str(path)!r} is truncated, damaged or of another kind ({reason})") from error
    return content


def check_archive(path: Path) -> None:
    """Raise ValueError or BadZipFile unless the file is an undamaged archive in exactly the form that torch writes."""
    size = path.stat().st_size
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        # Torch and zipfile parse archives differently, so only files that both read alike are accepted.
        file.seek(size - END.size)
        if not file.read().startswith(b"PK\5\6") or archive.comment:
            raise ValueError("there is data after the archive")
        entries = archive.infolist()
        names = [entry.filename.lower() for entry in entries]
        if len(set(names)) < len(names) or len({name.partition("/")[0] for name in names}) != 1:
            raise ValueError("the archive holds a name twice, or more than one folder")
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
            raise ValueError("the archive is compressed or encrypted")
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError("the content of the archive is larger than the file")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"{damaged} is damaged")
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                check_makers(archive.read(entry))


def check_makers(pickled: bytes) -> None:
    """Raise ValueError if unpickling would create anything but containers, numbers, strings and tensors."""
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "GLOBAL" and MAKERS.fullmatch(argument) is None:
            raise ValueError(f"it would make a {argument.replace(' ', '.')}")


def check_content(content: Any, size: int) -> None:
    """Raise ValueError if `content`, from a file of `size` bytes, is not plain data or is much larger than the file.

    A shared object is counted each time it is referenced, because traversing or copying visits it each time.
    """
    values, tensors, storages = 0, 0, dict[int, int]()
    level = [content]
    for _ in range(MAX_DEPTH):
        if not level:
            break
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list | tuple | set):
                below += value
            elif isinstance(value, Tensor):
                tensors += check_tensor(value)
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            elif isinstance(value, int):
                if not SMALLEST <= value <= LARGEST:
                    raise ValueError("it holds a whole number that torch cannot hold")
            elif not isinstance(value, float | str | bytes | None):
                raise ValueError(f"it holds a {type(value).__name__}")
            values += 1
            if values + len(below) > size:
                raise ValueError("it holds more values than it has bytes")
        level = below
    if level:
        raise ValueError("containers are nested too deeply")
    if tensors > MAX_COPIES * size or sum(storages.values()) > size:
        raise ValueError("its tensors are larger than the file")


def check_tensor(tensor: Tensor) -> int:
    """Return the size of the tensor in bytes. Raises ValueError unless it is dense and its storage holds that many."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise ValueError(f"it holds a tensor of layout {tensor.layout}")
    wanted = tensor.numel() * tensor.element_size()
    if wanted > tensor.untyped_storage().nbytes():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is a view of less")
    return wanted
