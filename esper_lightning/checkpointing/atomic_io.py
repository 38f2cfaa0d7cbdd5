"""Atomic writing of checkpoints, with a check of the free disk space first."""

import errno
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from esper_lightning.checkpointing.shards import SHARDS_KEY, remove_other_shards
from esper_lightning.checkpointing.validate import check_saved_policy
from esper_lightning.errors import find_system_error
from esper_lightning.serialization.replace import replace_durably
from esper_lightning.serialization.safe_load import read_tensors

BYTES_PER_TENSOR, BYTES_PER_VALUE, MARGIN_BYTES = 512, 24, 2**20
"""Upper bounds of a checkpoint's overhead in bytes. Measured: 266 per tensor, 9 per number in a list."""


class DiskError(OSError):
    """Error for a file that cannot be written to disk, with the path and the reason."""

    def __init__(self, path: Path, reason: str, number: int = errno.ENOSPC) -> None:
        super().__init__(number, f"{str(path)!r} cannot be written: {reason}")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint writer that writes a temporary file and renames it, so that a crash keeps the previous checkpoint.

    Args:
        opened: Contents of checkpoints that were read before, by path. They are handed on instead of read again.

    Attributes:
        listeners: Functions called after every write with the path and the duration in seconds.
    """

    def __init__(self, opened: dict[str, dict[str, Any]] | None = None) -> None:
        super().__init__()
        self.opened = opened if opened is not None else {}
        self.listeners: list[Callable[[Path, float], None]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises DiskError if it does not fit on the disk, and DivergedError if its policy is not finite; the previous
        file is kept.
        """
        start = time.perf_counter()
        check_saved_policy(checkpoint)
        target = Path(path)

        def write(file: BinaryIO) -> None:
            check_space(checkpoint, target)
            torch.save(checkpoint, file)

        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_durably(target, write)
        except (OSError, RuntimeError) as error:
            if isinstance(error, DiskError) or (failure := find_system_error(error)) is None:
                raise
            assert failure.errno is not None
            raise DiskError(target, f"{failure.strerror}", failure.errno) from error
        remove_other_shards(target, checkpoint.get("HostPoolData", {}).get("pool", {}).get(SHARDS_KEY))
        for listener in self.listeners:
            listener(target, time.perf_counter() - start)

    def load_checkpoint(self, path: str | Path, *_: object, **__: object) -> dict[str, Any]:
        """Read a checkpoint of plain data and tensors; all other arguments are ignored."""
        return self.opened.pop(str(path), None) or read_tensors(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file with those of its hosts, but never another folder: the path may come from a checkpoint."""
        if Path(path).is_file():
            Path(path).unlink()
            remove_other_shards(path, None)


def check_space(checkpoint: Any, target: Path) -> None:
    """Raise DiskError unless there is room for the checkpoint beside the existing one."""
    disk = shutil.disk_usage(target.parent)
    needed = size_on_disk(checkpoint)
    if disk.total > 0 and disk.free < needed:  # some file systems report a size of 0
        raise DiskError(target, f"{format_megabytes(needed)} are needed, {format_megabytes(disk.free)} are free")


def format_megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def size_on_disk(content: Any) -> int:
    """Return an upper estimate of the bytes that `torch.save` writes."""
    storages: dict[int, int] = {}
    tensors = values = 0
    for value in _walk(content):
        values += 1
        if isinstance(value, Tensor):
            tensors += 1
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, str | bytes):
            values += len(value) // 16
    return sum(storages.values()) + BYTES_PER_TENSOR * tensors + BYTES_PER_VALUE * values + MARGIN_BYTES


def _walk(content: Any) -> Iterator[Any]:
    """Yield the content and everything in it, in no particular order."""
    # Nested generators would pass each value on at every level: five times the time for the states of hosts.
    left = [content]
    while left:
        value = left.pop()
        yield value
        if isinstance(value, dict):
            left += value
            left += value.values()
        elif isinstance(value, list | tuple | set):
            left += value
