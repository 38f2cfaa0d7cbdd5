"""Files of tensors that somebody else may have made: they run no code, are whole, and take no more memory than disk.

`torch.load(weights_only=True)` runs no code, but takes damaged tensors for sound ones, and a file of a few bytes may
ask it for any amount of memory.
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
"""What reading a file that is something else, or using what it holds, has been seen to raise."""

MAKERS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch Size|torch (?!Typed|Untyped)\w+Storage"
)
"""What a file may name to be made on reading: all that state dicts need. Of what torch allows besides, much allocates
as much as the file asks for."""

END = struct.Struct("<4s4H2LH")
"""The last record of a zip archive that has no comment."""

MAX_DEPTH = 48
"""Containers within containers: four times as deep as a checkpoint is."""

MAX_COPIES = 4
"""Tensors may share memory (tied weights), but together be no larger than this many times the file."""

SMALLEST, LARGEST = -(2**63), 2**64 - 1
"""Whole numbers that torch can hold."""


CPU = torch.device("cpu")


def read_tensors(path: Path, device: torch.device = CPU) -> Any:
    """What `torch.save` wrote to `path`. Raises ValueError, saying why, unless it is whole and plain data."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is not there, or not a file")
    try:
        check_archive(path)
        content = torch.load(path, map_location=device, weights_only=True)
        check_content(content, path.stat().st_size)
    except NOT_TENSORS as error:
        reason = str(error).partition("\n")[0] if type(error) is ValueError else type(error).__name__
        raise ValueError(f"{str(path)!r} is truncated, damaged or of another kind ({reason})") from error
    return content


def check_archive(path: Path) -> None:
    """Raises ValueError or BadZipFile unless the file is an archive as torch writes it, to the last bit."""
    size = path.stat().st_size
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        # Torch reads the archive by other rules than we do: so there must be one way alone to read it.
        file.seek(size - END.size)
        if not file.read().startswith(b"PK\5\6") or archive.comment:
            raise ValueError("something follows the archive")
        entries = archive.infolist()
        names = [entry.filename.lower() for entry in entries]
        if len(set(names)) < len(names) or len({name.partition("/")[0] for name in names}) != 1:
            raise ValueError("the archive holds a name twice, or more than one folder")
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
            raise ValueError("the archive is compressed or encrypted")
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError("the archive is larger within than without")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"{damaged} is damaged")
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                check_makers(archive.read(entry))


def check_makers(pickled: bytes) -> None:
    """Raises ValueError if unpickling would make anything but containers, numbers, strings and tensors."""
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "GLOBAL" and MAKERS.fullmatch(argument) is None:
            raise ValueError(f"it would make a {argument.replace(' ', '.')}")


def check_content(content: Any, size: int) -> None:
    """Raises ValueError if `content`, from a file of `size` bytes, is no plain data or much larger than the file.

    What is shared counts wherever it stands: whoever goes through the content, or copies it, goes through all of it.
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
    """Bytes of the tensor. Raises ValueError unless it has a number of its own in every place."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise ValueError(f"it holds a tensor of layout {tensor.layout}")
    wanted = tensor.numel() * tensor.element_size()
    if wanted > tensor.untyped_storage().nbytes():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is a view of less")
    return wanted
