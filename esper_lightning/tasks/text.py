"""Next-byte prediction: on any file, and on the source code of Python itself. T bytes in a sequence."""

import sysconfig
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from esper_lightning.tasks.task import Score, Split, Task, TaskData

PYTHON_REFERENCE = "python"
"""Name of the Python language reference as a source: 460 kB of English that come with CPython, without a download."""

TextScore = Literal["accuracy", "likelihood"]

N_BYTE_TOKENS = 256
"""Number of tokens where each byte is one."""

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
"""Folders below the standard library that are not part of it."""


class Text(Task):
    """Next-byte prediction on a text.

    The text is cut into three consecutive parts: training, validation and test. A file is not read into memory, but
    mapped, so it may be larger than memory, and must not change in the meantime.

    Args:
        source: Path of a file; `python`: the Python language reference, which comes with CPython.
        length: Number of bytes T in a sequence.
        validation, test: Share of the text in each part.
        score: accuracy: share of the bytes that are predicted correctly; likelihood: see `Score`.
    """

    def __init__(
        self,
        source: str = PYTHON_REFERENCE,
        *,
        length: int = 64,
        validation: float = 0.05,
        test: float = 0.1,
        score: TextScore = "accuracy",
    ) -> None:
        check_shares(type(self).__name__, validation, test)
        self.score: Score = score
        self.source = source
        self.length = length
        self.shares = (1.0 - validation - test, 1.0 - test)

    def load(self) -> TaskData:
        stream, ends = self._read()
        return TaskData(*(sequences(part, self.length) for part in stream.tensor_split(ends)), outputs=N_BYTE_TOKENS)

    def _read(self) -> tuple[Tensor, list[int]]:  # [n] uint8; where training and validation end
        if self.source == PYTHON_REFERENCE:
            from pydoc_data.topics import topics

            text = "\n\n".join(topics[name] for name in sorted(topics))
            ends = [len(text[: int(share * len(text))].encode()) for share in self.shares]
            return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), ends
        path = Path(self.source)
        if not path.is_file():  # a device such as /dev/zero has no end
            raise ValueError(
                f"Text: there is no file {self.source!r}; name a file by --data.task.init_args.source, or "
                f"{PYTHON_REFERENCE} for the one that comes with CPython"
            )
        size = path.stat().st_size
        ends = [int(share * size) for share in self.shares]
        return torch.from_file(str(path), size=size, dtype=torch.uint8), ends


class Source(Text):
    """Next-byte prediction on the standard library of this Python, each file of which belongs to one part.

    Args:
        length: Number of bytes T in a sequence.
        validation, test: Share of the bytes in each part, up to the next end of a file.
        score: See `Text`.
    """

    def __init__(
        self, *, length: int = 128, validation: float = 0.05, test: float = 0.1, score: TextScore = "accuracy"
    ) -> None:
        super().__init__("", length=length, validation=validation, test=test, score=score)

    def _read(self) -> tuple[Tensor, list[int]]:
        files = [path.read_bytes() for path in source_files(Path(sysconfig.get_paths()["stdlib"]))]
        if not files:
            raise ValueError("Source: this Python has no source of its standard library; take the task Text")
        ends = np.cumsum([len(file) for file in files])
        stream = torch.frombuffer(bytearray().join(files), dtype=torch.uint8)
        return stream, [int(ends[np.searchsorted(ends, share * ends[-1] - 0.5)]) for share in self.shares]


def source_files(folder: Path) -> list[Path]:
    """Return the Python files below a folder in an order that mixes its parts and is the same everywhere."""
    relative = (path.relative_to(folder) for path in folder.rglob("*.py"))
    names = [path.as_posix() for path in relative if not SKIPPED_FOLDERS & set(path.parts)]
    return [folder / name for name in sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))]


def check_shares(task: str, validation: float, test: float) -> None:
    """Raise ValueError unless shares of a data set leave something to learn from."""
    if min(validation, test) <= 0.0 or validation + test >= 1.0:
        raise ValueError(
            f"{task}: validation and test must be positive and leave something to learn from, got {validation} and "
            f"{test}"
        )


def sequences(stream: Tensor, length: int) -> Split:  # [n] -> inputs [(n − 1) // T, T], targets one token later
    """Cut a stream of tokens into sequences, as views. Raises ValueError if it is too short."""
    count = (len(stream) - 1) // length if length > 0 else 0
    if count < 1:
        raise ValueError(f"a part of the text has {len(stream)} tokens, not one sequence of {length}; lower length")
    return Split(*(stream[start : start + count * length].view(count, length) for start in (0, 1)))
