"""Real data sets: images, the rows of a table, and the bytes of a text. All but CIFAR-10 come without a download."""

import csv
import sysconfig
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor

from esper_lightning.tasks.task import Score, Split, Task, TaskData

SPLIT_RNG_SEED = 0
"""RNG seed of the splits, which are the same in every run."""


class Digits(Task):
    """1,797 images of 8×8 pixels in ten classes (https://archive.ics.uci.edu/dataset/80), splits stratified by class.

    Args:
        validation: Number of images for rewards and observations.
        test: Number of images for evaluations only.
    """

    def __init__(self, validation: int = 200, test: int = 700) -> None:
        self.validation, self.test = validation, test
        if min(validation, test) < 10 or validation + test > 1787:
            raise ValueError(
                f"digits: validation and test need at least 10 images each and must leave 10 of 1,797 for training, "
                f"got {validation} and {test}"
            )

    def load(self) -> TaskData:
        images, digits = load_digits(return_X_y=True)
        parts = stratified(digits, self.validation, self.test)
        pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
        mean, deviation = pixels[parts[0]].mean(), pixels[parts[0]].std()
        inputs, targets = (pixels - mean) / deviation, torch.tensor(digits, dtype=torch.int64)
        return TaskData(*(Split(inputs[part], targets[part]) for part in parts), outputs=10)


def stratified(labels: np.ndarray, validation: float, test: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows of training, validation and test, with classes in the same proportion in each.

    Args:
        labels: Class of each row, or a quantity as a float.
        validation, test: Numbers of rows; or shares, that of validation among the rows that are left by test.
    """

    def split(rows: np.ndarray, share: float) -> Any:
        classes = None if labels.dtype.kind == "f" else labels[rows]
        return train_test_split(rows, test_size=share, random_state=SPLIT_RNG_SEED, stratify=classes)

    rest, tested = split(np.arange(len(labels)), test)
    trained, validated = split(rest, validation)
    return trained, validated, tested


class CIFAR10(Task):
    """60,000 colour images of 32×32 pixels in ten classes (https://www.cs.toronto.edu/~kriz/cifar.html).

    Only evaluations use its 10,000 test images; validation images come from the rest. In a minibatch each channel has
    mean 0 and standard deviation 1, and images are augmented (`data.env.training.augment`).

    Args:
        root: Folder that holds `cifar-10-batches-py`.
        download: Unpack the archive `cifar-10-python.tar.gz` in `root` where files are missing or damaged; download it
            (170 MB) if it is not there.
        validation: Number of images for rewards and observations.
    """

    def __init__(self, root: str = "data", *, download: bool = False, validation: int = 5000) -> None:
        self.root, self.download, self.validation = Path(root), download, validation

    def load(self) -> TaskData:
        images, labels = self._read(train=True)
        if not 1 <= self.validation < len(images):
            raise ValueError(f"CIFAR10: validation must be at least 1 of {len(images)} images, got {self.validation}")
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_RNG_SEED))
        held_out, rest = order[: self.validation], order[self.validation :]
        scale = channel_statistics(images[rest])
        train, validation = (Split(images[part], labels[part], scale=scale) for part in (rest, held_out))
        test = Split(*self._read(train=False), scale=scale)
        # Floats once and for all: converting them in every validation would add 5 % to the tick of a small CNN.
        return TaskData(train, validation.batch(), test.batch(), outputs=10)

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:  # [n, 3, 32, 32] uint8, [n] int64
        from torchvision.datasets import CIFAR10 as Stored  # imported late: it takes a second

        try:
            stored = Stored(self.root, train=train, download=self.download)
        except (RuntimeError, OSError) as error:  # RuntimeError: a file is missing or damaged
            hint = "give --data.task.init_args.download true to fetch it (170 MB), or name its folder by root"
            if self.download:
                hint = f"remove {self.root / Stored.base_folder}, and without a network put {Stored.filename} beside it"
            raise ValueError(f"CIFAR10: no sound data set in {str(self.root)!r} ({error}); {hint}") from error
        return torch.from_numpy(stored.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(stored.targets)


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:  # [n, C, H, W] uint8 -> [C, 1, 1] each
    """Return mean and standard deviation of each channel, from counts of its 256 values to save a float copy."""
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]).double()
    values = torch.arange(256, dtype=torch.float64)
    mean = (counts * values).sum(1) / counts.sum(1)
    variance = (counts * (values - mean[:, None]) ** 2).sum(1) / counts.sum(1)
    return mean.float()[:, None, None], variance.sqrt().float()[:, None, None]


BUNDLED = {"wine": load_wine, "breast_cancer": load_breast_cancer, "digits": load_digits, "diabetes": load_diabetes}
"""Real tables in scikit-learn. Rows, columns, classes: wine 178, 13, 3; breast_cancer 569, 30, 2; digits 1,797, 64,
10. Rows, columns of a quantity: diabetes 442, 10."""

MAX_CATEGORIES = 32
"""Maximum number of one-hot columns for a column of words; the rarer words share one."""


class Tabular(Task):
    """Prediction of a column of a table from the others: a class, or with the score r2 a quantity.

    Numeric columns are scaled to mean 0 and standard deviation 1, with missing values replaced by the median; columns
    of words are one-hot encoded. A quantity to predict is scaled, too. All transforms are fitted to the training rows.

    Args:
        source: Path of a .csv file with a header line; or `wine`, `breast_cancer`, `digits` or `diabetes` (a
            quantity): tables of scikit-learn.
        target: Name of the column to predict, for a file.
        validation, test: Share of the rows in each split.
        score: accuracy or likelihood for classes, r2 for a quantity; see `Score`.
    """

    def __init__(
        self,
        source: str,
        target: str | None = None,
        *,
        validation: float = 0.2,
        test: float = 0.3,
        score: Score = "accuracy",
    ) -> None:
        check_shares("Tabular", validation, test)
        self.score: Score = score
        self.source, self.target = source, target
        self.validation, self.test = validation, test

    def load(self) -> TaskData:
        is_quantity = self.score == "r2"
        columns, labels = self._read()
        values, outputs = self._quantities(labels) if is_quantity else self._classes(labels)
        try:
            parts = stratified(values, self.validation / (1.0 - self.test), self.test)
        except ValueError as error:
            raise ValueError(f"Tabular: {self.source!r} has too few rows for its classes: {error}") from error
        train = parts[0]
        inputs = torch.from_numpy(np.concatenate([encode_column(column, train) for column in columns], axis=1))
        targets = torch.from_numpy(encode_column(values, train)[:, 0] if is_quantity else values)
        return TaskData(*(Split(inputs[part], targets[part]) for part in parts), outputs=outputs)

    def _classes(self, labels: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the number of the class of each row, and how many classes there are."""
        names, classes = np.unique(labels, return_inverse=True)
        rarest = np.bincount(classes).min()
        if len(names) < 2 or rarest < 3:
            raise ValueError(
                f"Tabular: {self.source!r} has {len(names)} classes, the rarest of {rarest} rows; each class needs 3 "
                "rows at least; a target that is a quantity needs --data.task.init_args.score r2"
            )
        return classes, len(names)

    def _quantities(self, labels: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the quantity of each row as a float, and 1: the outputs of a host."""
        try:
            values = labels.astype(float)
        except ValueError as error:
            raise ValueError(f"Tabular: the score r2 needs a target of numbers: {error}") from error
        if not np.isfinite(values).all() or len(set(values)) < 3:
            raise ValueError(f"Tabular: the target of {self.source!r} is constant or not finite; name a quantity")
        return values, 1

    def _read(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the columns, each [rows] of floats or words, and the labels [rows]."""
        if self.source in BUNDLED:
            x, y = BUNDLED[self.source](return_X_y=True)
            return list(np.asarray(x, dtype=np.float64).T), np.asarray(y)
        if not Path(self.source).is_file():
            raise ValueError(
                f"Tabular: there is no file {self.source!r}; name a .csv file by --data.task.init_args.source, or one "
                f"of {', '.join(BUNDLED)}"
            )
        return read_csv(Path(self.source), self.target)


def read_csv(path: Path, target: str | None) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the columns other than `target`, and the labels in `target`.

    Raises ValueError if there is no such column, or if names repeat, rows differ in length, or a label is missing.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            names, *rows = [*csv.reader(file)] or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"Tabular: {str(path)!r} is no CSV in UTF-8 ({error}); save it as such") from error
    if target not in names or len(set(names)) < len(names) or not rows:
        raise ValueError(
            f"Tabular: {str(path)!r} has no rows, no column {target!r} to learn, or a name twice; "
            f"--data.task.init_args.target names one of {', '.join(names)}"
        )
    place = names.index(target)
    for number, row in enumerate(rows, 2):
        if len(row) != len(names) or not row[place]:
            raise ValueError(
                f"Tabular: {str(path)!r}, line {number}: {len(row)} cells for {len(names)} columns, or no {target}"
            )
    *columns, labels = zip(*([*row[:place], *row[place + 1 :], row[place]] for row in rows), strict=True)
    return [parse_column(cells) for cells in columns], np.array(labels, dtype=object)


def parse_column(cells: tuple[str, ...]) -> np.ndarray:
    """Return the cells as floats, with NaN for empty cells, or as words if a cell is not a number."""
    try:
        return np.array([float(cell) if cell.strip() else np.nan for cell in cells])
    except ValueError:
        return np.array(cells, dtype=object)  # a fixed width would give every cell the size of the longest


def encode_column(column: np.ndarray, train: np.ndarray) -> np.ndarray:  # [rows] -> [rows, k]
    """Encode a column as network inputs, with scaler or one-hot encoder fitted to the rows `train`."""
    if column.dtype.kind == "f":
        transform = make_pipeline(SimpleImputer(strategy="median", keep_empty_features=True), StandardScaler())
    else:
        transform = OneHotEncoder(
            handle_unknown="infrequent_if_exist",
            max_categories=MAX_CATEGORIES,
            sparse_output=False,
            dtype=np.float32,  # pyright: ignore[reportArgumentType]  # its type is inferred from the default
        )
    return np.asarray(transform.fit(column[train, None]).transform(column[:, None]), dtype=np.float32)


PYTHON_REFERENCE = "python"
"""Name of the Python language reference as a source: 460 kB of English that come with CPython, without a download."""

TextScore = Literal["accuracy", "likelihood"]

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
        self.source, self.length = source, length
        self.shares = (1.0 - validation - test, 1.0 - test)

    def load(self) -> TaskData:
        stream, ends = self._read()
        parts = (sequences(part, self.length) for part in stream.tensor_split(ends))
        return TaskData(*parts, outputs=256)  # a token is a byte

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
