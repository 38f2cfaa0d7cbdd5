"""Next-token prediction on any UTF-8 file. T tokens in a sequence."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from esper_lightning.tasks.files import check_file
from esper_lightning.tasks.task import Split, Task, TaskData

PYTHON_REFERENCE = "python"
"""Name of the Python language reference as a source: 460 kB of English that come with CPython, without a download."""

BYTES_PER_BYTE = 32
"""Bytes of memory for each byte of a file: text and parts with up to 4 per character, tokens with 8 in 3 copies."""

N_BYTE_TOKENS = 256
"""Number of tokens where each byte is one."""


class Text(Task):
    """Next-token prediction. Accuracy is the share of tokens that are predicted correctly.

    The text is cut into three consecutive parts: training, validation and test.

    Args:
        source: Path of a UTF-8 file; `python`: the Python language reference, which comes with CPython.
        tokens: bytes: one token per byte. bpe: byte pair encoding (https://arxiv.org/abs/1508.07909) fitted to the
            training part; needs the package `tokenizers`.
        vocabulary: Number of tokens with bpe.
        length: Number of tokens T in a sequence.
        validation, test: Share of the text in each part.
        train: Number of sequences that hosts are trained on. None: all. Fewer make ticks shorter.
    """

    def __init__(
        self,
        source: str = PYTHON_REFERENCE,
        *,
        tokens: Literal["bytes", "bpe"] = "bytes",
        vocabulary: int = 1024,
        length: int = 64,
        validation: float = 0.05,
        test: float = 0.1,
        train: int | None = None,
    ) -> None:
        if length < 1 or (train is not None and train < 1):
            raise ValueError(f"Text: length and train must be at least 1, got {length} and {train}")
        if tokens == "bpe" and vocabulary <= N_BYTE_TOKENS:
            raise ValueError(f"Text: a vocabulary of bpe has more than {N_BYTE_TOKENS} tokens, got {vocabulary}")
        if min(validation, test) <= 0.0 or validation + test >= 1.0:
            raise ValueError(
                f"Text: validation and test must be positive and leave something to learn from, got {validation} and "
                f"{test}"
            )
        self.source = source
        self.tokens = tokens
        self.vocabulary = vocabulary
        self.length = length
        self.validation = validation
        self.test = test
        self.train = train

    def load(self) -> TaskData:
        text = self._read()
        first, second = (int(share * len(text)) for share in (1.0 - self.validation - self.test, 1.0 - self.test))
        parts = [text[:first], text[first:second], text[second:]]
        if self.tokens == "bytes":
            streams = [
                torch.from_numpy(np.frombuffer(part.encode(), dtype=np.uint8).astype(np.int64)) for part in parts
            ]
        else:
            tokenizer = train_tokenizer(parts[0], self.vocabulary)
            streams = [torch.tensor(tokenizer.encode(part).ids) for part in parts]
        splits = [self._sequences(stream) for stream in streams]
        train = Split(*(part[: self.train] for part in splits[0]))
        return TaskData(train, *splits[1:], classes=N_BYTE_TOKENS if self.tokens == "bytes" else self.vocabulary)

    def _read(self) -> str:
        if self.source == PYTHON_REFERENCE:
            from pydoc_data.topics import topics

            return "\n\n".join(topics[name] for name in sorted(topics))
        path = Path(self.source)
        if not path.is_file():  # a device such as /dev/zero has no end
            raise ValueError(
                f"Text: there is no file {self.source!r}; name a UTF-8 file by --data.task.init_args.source, or "
                f"{PYTHON_REFERENCE} for the one that comes with CPython"
            )
        check_file(path, "Text", bytes_per_byte=BYTES_PER_BYTE)
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"Text: {self.source!r} is not UTF-8 ({error.reason} at byte {error.start})") from error

    def _sequences(self, stream: Tensor) -> Split:  # [n] -> inputs [(n − 1) // T, T], targets one token later
        count = (len(stream) - 1) // self.length
        if count < 1:
            raise ValueError(
                f"Text: {self.source!r} is too short: a part of it has {len(stream)} tokens, not one sequence of "
                f"{self.length}; lower length, or name a longer text"
            )
        inputs, targets = (stream[start : start + count * self.length] for start in (0, 1))
        return Split(inputs.view(count, self.length).clone(), targets.view(count, self.length).clone())


def train_tokenizer(text: str, vocabulary: int) -> Any:
    """Train a byte pair encoder of `vocabulary` tokens on `text`. Raises ValueError if `tokenizers` is missing."""
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ImportError as error:
        raise ValueError("Text: bpe needs the package tokenizers; pip install tokenizers, or use bytes") from error
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=vocabulary, show_progress=False)
    return tokenizer
