"""Classification of table rows from a CSV file, an .npz file, or a data set of scikit-learn."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from esper_lightning.machine import check_memory
from esper_lightning.tasks.arrays import read_arrays
from esper_lightning.tasks.files import check_file
from esper_lightning.tasks.task import Split, Task, TaskData

SPLIT_RNG_SEED = 0
"""RNG seed of the split, which is the same in every run."""

BUNDLED = {"wine": load_wine, "breast_cancer": load_breast_cancer, "digits": load_digits}
"""Real tables in scikit-learn. Rows, columns, classes: wine 178, 13, 3; breast_cancer 569, 30, 2; digits 1,797, 64,
10."""

LARGEST_NUMBER = 1e150
"""Largest absolute value in a column: its square, which the standard deviation needs, is finite."""

MAX_CATEGORIES = 32
"""Maximum number of one-hot columns for a column of words; the rarer words share one."""

MAX_COLUMNS = 10_000
"""Maximum number of columns; each is encoded on its own, in a millisecond."""

BYTES_PER_BYTE = 32
"""Bytes of memory for each byte of a .csv file: a cell of two bytes is in several lists, and becomes a number."""

LISTED_NAMES = 50
"""Number of columns that an error message lists."""

BYTES_PER_INPUT = 16
"""Bytes of memory for each number of the encoded table: float32, in four copies."""


class Tabular(Task):
    """Classification of the rows of a table.

    Numeric columns are scaled to mean 0 and standard deviation 1, with missing values replaced by the median; columns
    of words are one-hot encoded. Both transforms are fitted to the training rows only.

    Args:
        source: Path of a .csv file with a header line, or of an .npz file with arrays `x` [rows, columns] and `y`
            [rows]; or `wine`, `breast_cancer` or `digits`: tables of scikit-learn.
        target: Name of the column that holds the class, for a .csv file.
        validation, test: Share of the rows in each split.
    """

    def __init__(self, source: str, target: str | None = None, *, validation: float = 0.2, test: float = 0.3) -> None:
        if min(validation, test) <= 0.0 or validation + test >= 1.0:
            raise ValueError(
                f"Tabular: validation and test must be positive and leave rows to learn from, got {validation} and "
                f"{test}"
            )
        self.source = source
        self.target = target
        self.validation = validation
        self.test = test

    def load(self) -> TaskData:
        columns, labels = self._read()
        classes, targets = np.unique(labels, return_inverse=True)
        rarest = np.bincount(targets).min()
        if len(classes) < 2 or rarest < 3:
            raise ValueError(
                f"Tabular: {self.source!r} has {len(classes)} classes, the rarest of {rarest} rows; each class needs 3 "
                f"rows at least, and a target that is a quantity is none"
            )
        rest, test = self._split(np.arange(len(targets)), targets, self.test)
        train, validation = self._split(rest, targets, self.validation / (1.0 - self.test))
        width = 0
        for name, column in columns.items():
            if column.dtype.kind != "f":
                width += min(MAX_CATEGORIES, len(set(column[train])))
                continue
            width += 1
            if np.isnan(column[train]).all():
                raise ValueError(
                    f"Tabular: {self.source!r}: column {name!r} has no value in the training rows; leave it out"
                )
            if (too_large := np.abs(column) > LARGEST_NUMBER).any():
                row = int(too_large.argmax())
                raise ValueError(
                    f"Tabular: {self.source!r}: column {name!r} holds {column[row]:g} in row {row + 1}, and numbers up "
                    f"to {LARGEST_NUMBER:g} can be scaled; correct it, or leave its cell empty"
                )
        check_memory(
            BYTES_PER_INPUT * width * len(labels),
            f"Tabular: {len(labels)} rows of {width} inputs need",
            "leave out rows or columns",
        )
        inputs = np.concatenate([encode_column(column, train) for column in columns.values()], axis=1)
        numbers, class_numbers = torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets, dtype=torch.int64)
        splits = [Split(numbers[part], class_numbers[part]) for part in (train, validation, test)]
        return TaskData(*splits, classes=len(classes))

    def _split(self, rows: np.ndarray, targets: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
        try:
            parts: list[Any] = train_test_split(
                rows, test_size=share, random_state=SPLIT_RNG_SEED, stratify=targets[rows]
            )
        except ValueError as error:  # the split would have fewer rows than there are classes
            raise ValueError(f"Tabular: {self.source!r} has too few rows for its classes: {error}") from error
        return parts[0], parts[1]

    def _read(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the columns by name or number, each [rows] of floats or words, and the labels [rows]."""
        path = Path(self.source)
        if self.source in BUNDLED:
            x, y = BUNDLED[self.source](return_X_y=True)
        elif not path.is_file():
            raise ValueError(
                f"Tabular: there is no file {self.source!r}; name a .csv or .npz file by --data.task.init_args.source, "
                f"or one of {', '.join(BUNDLED)}"
            )
        elif path.suffix == ".npz":
            x, y = read_arrays(path)
        else:
            return read_csv(path, self.target)
        check_column_count(x.shape[1], self.source)
        columns = np.asarray(x, dtype=np.float64).T
        return {str(number): column for number, column in enumerate(columns)}, np.asarray(y)


def check_column_count(number: int, source: str) -> None:
    """Raise ValueError if a table has more than `MAX_COLUMNS` columns."""
    if number > MAX_COLUMNS:
        raise ValueError(f"Tabular: {source!r} has {number} columns, more than {MAX_COLUMNS}; leave some out")


def read_csv(path: Path, target: str | None) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the columns other than `target` by name, and the labels in `target`.

    Raises ValueError if the file is empty, two columns have one name, rows differ in length, a cell holds a NUL
    character, a label is missing, or there is no such column.
    """
    check_file(path, "Tabular", bytes_per_byte=BYTES_PER_BYTE)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            names, *rows = [*csv.reader(file)] or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"Tabular: {str(path)!r} is no CSV in UTF-8 ({error}); save it as such") from error
    if not names:
        raise ValueError(f"Tabular: {str(path)!r} has no header line; the first line must name the columns")
    if target not in names:
        raise ValueError(
            f"Tabular: {str(path)!r} has no column {target!r} to learn; --data.task.init_args.target names one of "
            f"{', '.join(names[:LISTED_NAMES])}"
        )
    check_column_count(len(names), str(path))
    name, occurrences = Counter(names).most_common(1)[0]
    if occurrences > 1:
        raise ValueError(f"Tabular: {str(path)!r}: {occurrences} columns are called {name!r}; rename or remove them")
    for number, row in enumerate([names, *rows], 1):
        if any("\0" in cell for cell in row):
            raise ValueError(f"Tabular: {str(path)!r}, line {number}: a NUL character; the file is damaged")
        if len(row) != len(names):
            raise ValueError(f"Tabular: {str(path)!r}, line {number}: {len(row)} cells, {len(names)} columns")
    if not rows:
        raise ValueError(f"Tabular: {str(path)!r} has a header line and no rows; get the file again")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    labels = np.array(columns.pop(target), dtype=object)
    if (labels == "").any():
        raise ValueError(f"Tabular: {str(path)!r}: {(labels == '').sum()} rows have no {target}; leave them out")
    return {name: parse_column(cells) for name, cells in columns.items()}, labels


def parse_column(cells: Sequence[str]) -> np.ndarray:
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
