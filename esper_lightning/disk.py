"""Checkpoints on a disk: written whole or not at all, and never begun where they do not fit."""

import errno
import glob
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from esper_lightning.endings import disk_failure
from esper_lightning.growth.reading import read_tensors

PER_TENSOR, PER_VALUE, MARGIN = 512, 24, 2**20
"""Bytes in a file beside the numbers in tensors; measured: 266 a tensor, 9 a number in a list."""


class DiskError(OSError):
    """A file that a disk could not take: which one, and why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(errno.ENOSPC, f"{str(path)!r} cannot be written: {reason}")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames: a crash leaves the last good checkpoint, on any file system.

    Attributes:
        listeners: Told of every checkpoint that is written, and how many seconds that took.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Callable[[Path, float], None]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Raises DiskError, and leaves the checkpoint of before, if this one does not fit."""
        began = time.perf_counter()
        target = Path(path)
        draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for left_over in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
                left_over.unlink(missing_ok=True)  # of a process that was killed while it wrote
            check_space(checkpoint, target)
            try:
                with draft.open("xb") as file:  # never through a link that somebody has put there
                    torch.save(checkpoint, file)
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(target)
            finally:
                draft.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            if isinstance(error, DiskError) or (failure := disk_failure(error)) is None:
                raise
            raise DiskError(target, f"{failure.strerror}") from error
        for listener in self.listeners:
            listener(target, time.perf_counter() - began)

    def load_checkpoint(self, path: str | Path, *_: object, **__: object) -> dict[str, Any]:
        """Reads plain data alone, whatever it is asked for."""
        return read_tensors(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a file, never a folder: what to remove comes from a checkpoint."""
        if Path(path).is_file():
            Path(path).unlink()


def check_space(checkpoint: Any, target: Path) -> None:
    """Raises DiskError unless the checkpoint fits beside the one that is there."""
    disk = shutil.disk_usage(target.parent)
    needed = size_on_disk(checkpoint)
    if disk.total > 0 and disk.free < needed:  # some file systems do not say how large they are
        raise DiskError(target, f"{megabytes(needed)} are needed, {megabytes(disk.free)} are free")


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def size_on_disk(content: Any) -> int:
    """Bytes that `torch.save` will need, estimated from above."""
    storages: dict[int, int] = {}
    tensors = values = 0
    for value in _values(content):
        values += 1
        if isinstance(value, Tensor):
            tensors += 1
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, str | bytes):
            values += len(value) // 16
    return sum(storages.values()) + PER_TENSOR * tensors + PER_VALUE * values + MARGIN


def _values(content: Any) -> Iterator[Any]:
    yield content
    if isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from _values(value)
    elif isinstance(content, list | tuple | set):
        for value in content:
            yield from _values(value)
