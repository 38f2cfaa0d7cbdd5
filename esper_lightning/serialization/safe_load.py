"""Safe loading of untrusted tensor files: no code is run, damage is detected, memory is limited by the file's size.

`torch.load(weights_only=True)` runs no code, but does not detect damaged tensors, and a file of a few bytes can make it
allocate any amount of memory.
"""

import os
import pickle
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

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

END_RECORD, END_RECORD_64, LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
"""Layouts of the records at the end of a zip archive: the last one, one with larger numbers, and that one's position.

https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3.14 to 4.3.16."""

ENTRY, END, END_64, LOCATOR_64 = b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7"
"""First bytes of an entry and of these records."""

MAX_DEPTH = 48
"""Maximum depth of nested containers: four times the depth of a checkpoint."""

MAX_COPIES = 4
"""Maximum total size of all tensors, as a multiple of the file size; above 1 because tied weights share memory."""

MAX_TEXT = 16
"""Maximum length of all texts in characters, each counted as often as it is referred to, as a multiple of the file
size."""

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1
"""Range of integers that torch can represent."""

PROTOCOL = 2
"""Protocol of pickles that `torch.save` writes unless it is told otherwise."""

PLAIN_KEYS = frozenset(
    {
        "BINUNICODE",
        "SHORT_BINSTRING",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
    }
)
"""Operations of a pickle whose results may be keys. A text has another hash in every process, and few numbers share
one."""

LARGEST_KEY = 2**61 - 2
"""Largest integer that may be a key; above it, integers share hashes with smaller ones."""

ORDERED_DICT = "collections OrderedDict"

CPU = torch.device("cpu")


def read_tensors(path: Path, device: torch.device = CPU) -> Any:
    """Return the object that `torch.save` wrote to `path`. Raises ValueError unless it is undamaged, plain data."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist or is not a file")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            check_archive(file, size)
            file.seek(0)
            content = torch.load(file, map_location=device, weights_only=True)
        check_content(content, size)
    except PermissionError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except READ_ERRORS as error:
        reason = str(error).partition("\n")[0] if type(error) is ValueError else type(error).__name__
        raise ValueError(f"{str(path)!r} is truncated, damaged or of another kind ({reason})") from error
    return content


def check_archive(file: BinaryIO, size: int) -> None:
    """Raise ValueError or BadZipFile unless a file of `size` bytes is an undamaged archive in the form that torch
    writes."""
    # Torch and zipfile parse archives differently, so only files that both read alike are accepted.
    check_layout(file, size)
    with zipfile.ZipFile(file) as archive:
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
                check_pickle(archive.read(entry))


def check_layout(file: BinaryIO, size: int) -> None:
    """Raise ValueError unless the file begins with an entry and ends with the only directory and its records."""
    file.seek(0)
    if (
        file.read(len(ENTRY)) != ENTRY
    ):  # torch takes any other beginning for its old format, which is read without these checks
        raise ValueError("it does not begin with an archive")
    end = size - END_RECORD.size
    file.seek(end)
    kind, *_, directory_size, directory_start, comment = END_RECORD.unpack(file.read())
    if kind != END or comment:
        raise ValueError("there is data after the archive")
    directory = (directory_size, directory_start)
    file.seek(max(0, end - LOCATOR.size))
    kind, _, record, _ = LOCATOR.unpack(file.read(LOCATOR.size))
    if kind == LOCATOR_64:  # a second end record with larger numbers, as torch always writes
        end -= LOCATOR.size + END_RECORD_64.size
        file.seek(max(0, end))
        kind, *_, directory_size, directory_start = END_RECORD_64.unpack(file.read(END_RECORD_64.size))
        if (kind, record) != (END_64, end) or any(
            small not in (large, 2**32 - 1)
            for small, large in zip(directory, (directory_size, directory_start), strict=True)
        ):
            raise ValueError("the archive has two directories")
    if directory_start + directory_size != end:
        raise ValueError("the archive has two directories, or there is data before it")


def check_pickle(pickled: bytes) -> None:
    """Raise ValueError if unpickling would create anything but containers, numbers, strings and tensors, or a mapping
    or set whose keys may share a hash: the time to create one grows with the square of their number.

    The operations are followed without creating anything. In place of each object on the stack there is the name of
    the operation that creates it.
    """
    stack: list[str] = []
    marks: list[int] = []  # positions in the stack
    memo: dict[Any, str] = {}
    for operation, argument, _ in pickletools.genops(pickled):
        name = operation.name
        match name:
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
                continue
            case "PROTO" if argument != PROTOCOL:
                raise ValueError(f"its pickle has protocol {argument}, torch writes {PROTOCOL}")
            case "MARK":
                marks.append(len(stack))
                continue
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
                continue
            case "GLOBAL":
                assert isinstance(argument, str), "the name of the global"
                if ALLOWED_GLOBALS.fullmatch(argument) is None:
                    raise ValueError(f"it would make a {argument.replace(' ', '.')}")
                name = argument
            case "LONG1" if abs(argument) > LARGEST_KEY:  # pyright: ignore[reportArgumentType]  # an integer
                name = "a large integer"
        before = operation.stack_before
        has_mark = pickletools.markobject in before
        start = marks.pop() - before.index(pickletools.markobject) if has_mark else len(stack) - len(before)
        taken = stack[start:]
        del stack[start:]
        match name:
            case "SETITEM" | "SETITEMS":
                keys = taken[1::2]
            case "ADDITEMS":
                keys = taken[1:]
            case "REDUCE" if taken[0] == ORDERED_DICT and taken[1] != "EMPTY_TUPLE":
                raise ValueError("it holds a mapping that is made from arguments")
            case _:
                keys = []
        if not PLAIN_KEYS.issuperset(keys):
            raise ValueError("it holds a mapping with other keys than texts and small numbers")
        stack += [name] * len(operation.stack_after)


def check_content(content: Any, size: int) -> None:
    """Raise ValueError if `content`, from a file of `size` bytes, is not plain data or is much larger than the file.

    A shared object is counted each time it is referenced, because traversing or copying visits it each time.
    """
    num_values, text, tensor_bytes, storage_bytes = 0, 0, 0, dict[int, int]()
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
            elif isinstance(value, str | bytes):
                text += len(value)
            elif not isinstance(value, float | None):
                raise ValueError(f"it holds a {type(value).__name__}")
            num_values += 1
            if num_values + len(next_level) > size or text > MAX_TEXT * size:
                raise ValueError("it holds more values, or longer texts, than its size allows")
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
