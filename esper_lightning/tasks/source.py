"""Next-byte prediction on the source code of Python's own installation. T bytes in a sequence."""

import os
import platform
import sysconfig
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper_lightning.tasks.task import Measures, Split, Task, TaskData

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
"""Folders below the standard library that are not part of it."""


class Source(Task):
    """Next-byte prediction on the standard library of this Python. Accuracy is the share of bytes predicted correctly.

    All files are written one after the other into one file, which is mapped into memory: a token takes one byte, and
    only the samples of a minibatch are copied. Whole files belong to training, validation or test.

    Args:
        root: Folder of that file, which is written where it is missing.
        length: Number of bytes T in a sequence.
        validation, test: Share of the bytes in each part, up to the next end of a file.
        train: Number of sequences that hosts are trained on. None: all. Fewer make ticks shorter.
    """

    def __init__(
        self,
        root: str = "data",
        *,
        length: int = 128,
        validation: float = 0.05,
        test: float = 0.1,
        train: int | None = None,
    ) -> None:
        if length < 1 or (train is not None and train < 1):
            raise ValueError(f"Source: length and train must be at least 1, got {length} and {train}")
        if min(validation, test) <= 0.0 or validation + test >= 1.0:
            raise ValueError(
                f"Source: validation and test must be positive and leave something to learn from, got {validation} and "
                f"{test}"
            )
        self.root = Path(root)
        self.length = length
        self.shares = (1.0 - validation - test, 1.0 - test, 1.0)
        self.train = train

    def load(self) -> TaskData:
        paths = source_files(Path(sysconfig.get_paths()["stdlib"]))
        ends = np.cumsum([path.stat().st_size for path in paths])
        if not len(ends):
            raise ValueError("Source: this Python has no source of its standard library; take the task Text")
        stream = torch.from_numpy(np.memmap(self._write(paths, int(ends[-1])), np.uint8, mode="c"))
        cuts = [0, *(int(ends[np.searchsorted(ends, share * ends[-1] - 0.5)]) for share in self.shares)]
        train, validation, test = (self._sequences(stream[start:end]) for start, end in pairwise(cuts))
        return TaskData(Split(*(part[: self.train] for part in train)), validation, test, classes=256)

    def measure(self, outputs: Tensor, targets: Tensor) -> Measures:
        return super().measure(outputs, targets.long())

    def test_metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return super().test_metrics(outputs, targets.long())

    def _write(self, paths: list[Path], size: int) -> Path:
        """Return the path of the file with all sources; write it if it is missing or of another size."""
        self.root.mkdir(parents=True, exist_ok=True)
        written = self.root / f"source-{platform.python_version()}.bin"
        if not written.exists() or written.stat().st_size != size:
            part = written.with_suffix(f".{os.getpid()}")  # another process may write the same file
            with part.open("wb") as file:
                for path in paths:
                    file.write(path.read_bytes())
            part.replace(written)
        return written

    def _sequences(self, stream: Tensor) -> Split:  # [n] -> inputs [(n − 1) // T, T], targets one byte later
        count = (len(stream) - 1) // self.length
        if count < 1:
            raise ValueError(f"Source: a part has {len(stream)} bytes, not one sequence of {self.length}; lower length")
        return Split(*(stream[start : start + count * self.length].view(count, self.length) for start in (0, 1)))


def source_files(folder: Path) -> list[Path]:
    """Return the Python files below a folder in an order that mixes its parts and is the same everywhere."""
    relative = (path.relative_to(folder) for path in folder.rglob("*.py"))
    names = [path.as_posix() for path in relative if not SKIPPED_FOLDERS & set(path.parts)]
    return [folder / name for name in sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))]
