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

READ_ERRORS = (
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

ALLOWED_GLOBALS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch Size|torch (?!Typed|Untyped)\w+Storage"
)
"""Globals that a pickle may refer to: all that state dicts need. Many of the others that torch allows allocate as much
memory as the file asks for."""

ZIP_END_RECORD = struct.Struct("<4s4H2LH")
"""Layout of the last record of a zip archive without a comment."""

MAX_DEPTH = 48
"""Maximum depth of nested containers: four times the depth of a checkpoint."""

MAX_COPIES = 4
"""Maximum total size of all tensors, as a multiple of the file size; above 1 because tied weights share memory."""

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1
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
    except READ_ERRORS as error:
        reason = str(error).partition("\n")[0] if type(error) is ValueError else type(error).__name__
        raise ValueError(f"{str(path)!r} is truncated, damaged or of another kind ({reason})") from error
    return content


def check_archive(path: Path) -> None:
    """Raise ValueError or BadZipFile unless the file is an undamaged archive in exactly the form that torch writes."""
    size = path.stat().st_size
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        # Torch and zipfile parse archives differently, so only files that both read alike are accepted.
        file.seek(size - ZIP_END_RECORD.size)
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
        if (damaged_entry := archive.testzip()) is not None:
            raise ValueError(f"{damaged_entry} is damaged")
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                check_globals(archive.read(entry))


def check_globals(pickled: bytes) -> None:
    """Raise ValueError if unpickling would create anything but containers, numbers, strings and tensors."""
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "GLOBAL":
            assert isinstance(argument, str), "the name of the global"
            if ALLOWED_GLOBALS.fullmatch(argument) is None:
                raise ValueError(f"it would make a {argument.replace(' ', '.')}")


def check_content(content: Any, size: int) -> None:
    """Raise ValueError if `content`, from a file of `size` bytes, is not plain data or is much larger than the file.

    A shared object is counted each time it is referenced, because traversing or copying visits it each time.
    """
    num_values, tensor_bytes, storage_bytes = 0, 0, dict[int, int]()
    level = [content]
    for _ in range(MAX_DEPTH):
        if not level:
            break
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                next_level += [*value, *value.values()]
            elif isinstance(value, list | tuple | set):
                next_level += value
            elif isinstance(value, Tensor):
                tensor_bytes += check_tensor(value)
                storage_bytes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            elif isinstance(value, int):
                if not MIN_INTEGER <= value <= MAX_INTEGER:
                    raise ValueError("it holds a whole number that torch cannot hold")
            elif not isinstance(value, float | str | bytes | None):
                raise ValueError(f"it holds a {type(value).__name__}")
            num_values += 1
            if num_values + len(next_level) > size:
                raise ValueError("it holds more values than it has bytes")
        level = next_level
    if level:
        raise ValueError("containers are nested too deeply")
    if tensor_bytes > MAX_COPIES * size or sum(storage_bytes.values()) > size:
        raise ValueError("its tensors are larger than the file")


def check_tensor(tensor: Tensor) -> int:
    """Return the size of the tensor in bytes. Raises ValueError unless it is dense and its storage holds that many."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise ValueError(f"it holds a tensor of layout {tensor.layout}")
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes > tensor.untyped_storage().nbytes():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is a view of less")
    return num_bytes
