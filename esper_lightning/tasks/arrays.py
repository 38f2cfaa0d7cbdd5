"""Reading of .npz files, whose arrays may be much larger than the file: sizes are checked before memory is taken."""

import math
import zlib
from pathlib import Path
from tokenize import TokenError
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

import numpy as np
from numpy.lib import format as npy

from esper_lightning.machine import check_memory

HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
"""Reader of the header of an array, by version of the format."""

KINDS = {"x": "biuf", "y": "biufUS"}
"""Kinds of numpy's types that an array may have: booleans, integers and floats; labels may be texts."""

BYTES_PER_ELEMENT = 32
"""Bytes of memory for each element beside its own size: conversion to float64, scaling, and copies in float32."""


def read_arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return `x` [rows, columns] and `y` [rows] of an .npz file.

    Raises ValueError if the file is damaged, if arrays are missing, misshapen or larger than the memory, or if they
    hold anything but numbers and, in `y`, texts.
    """
    try:
        with ZipFile(path) as archive:
            if not {"x.npy", "y.npy"} <= set(archive.namelist()):
                found = ", ".join(name.removesuffix(".npy") for name in archive.namelist()[:10])
                raise ValueError(f"Tabular: {str(path)!r} holds {found or 'nothing'}; it needs x and y")
            needed = sum(_check_array(archive, name, path) for name in KINDS)
            check_memory(needed, f"Tabular: the arrays in {str(path)!r} need", "name a smaller file")
            x, y = (_read_array(archive, name) for name in KINDS)
    except (BadZipFile, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"Tabular: {str(path)!r} is damaged: {error}; get the file again") from error
    if x.ndim != 2 or y.shape != x.shape[:1] or 0 in x.shape:
        raise ValueError(f"Tabular: x is {list(x.shape)} and y {list(y.shape)}; they need [rows, columns] and [rows]")
    if y.dtype.kind == "f" and np.isnan(y).any():
        raise ValueError(f"Tabular: {str(path)!r}: {np.isnan(y).sum()} rows have no label in y; leave them out")
    return x, y


def _check_array(archive: ZipFile, name: str, path: Path) -> int:
    """Return the memory in bytes that an array needs, by its header. Raises ValueError if it cannot be read."""
    entry = archive.getinfo(f"{name}.npy")
    if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):  # the other methods unpack any amount at once
        raise ValueError(f"Tabular: {str(path)!r} is compressed by another method than numpy's; save it by numpy.savez")
    try:
        with archive.open(entry) as file:
            version = npy.read_magic(file)
            shape, _, dtype = HEADER_READERS[version](file)
    except (ValueError, SyntaxError, TokenError, KeyError, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"Tabular: {str(path)!r}: {name} is no array of numpy: {reason}; save it by numpy.savez"
        ) from error
    if dtype.kind not in KINDS[name] or dtype.hasobject:
        raise ValueError(f"Tabular: {str(path)!r}: {name} holds {dtype}; save numbers" + " or texts" * (name == "y"))
    elements = math.prod(shape)
    if min(shape, default=0) < 0 or elements * max(1, dtype.itemsize) > entry.file_size:
        raise ValueError(f"Tabular: {str(path)!r} is damaged: {name} is shorter than its shape; get the file again")
    return elements * (BYTES_PER_ELEMENT + dtype.itemsize)


def _read_array(archive: ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as file:
        return npy.read_array(file, allow_pickle=False)
