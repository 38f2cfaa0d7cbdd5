"""Classification of table rows from a CSV file, or a data set of scikit-learn."""

import csv
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from esper_lightning.tasks.images import stratified
from esper_lightning.tasks.task import Split, Task, TaskData
from esper_lightning.tasks.text import check_shares

BUNDLED = {"wine": load_wine, "breast_cancer": load_breast_cancer, "digits": load_digits}
"""Real tables in scikit-learn. Rows, columns, classes: wine 178, 13, 3; breast_cancer 569, 30, 2; digits 1,797, 64,
10."""

MAX_CATEGORIES = 32
"""Maximum number of one-hot columns for a column of words; the rarer words share one."""


class Tabular(Task):
    """Classification of the rows of a table.

    Numeric columns are scaled to mean 0 and standard deviation 1, with missing values replaced by the median; columns
    of words are one-hot encoded. Both transforms are fitted to the training rows only.

    Args:
        source: Path of a .csv file with a header line; or `wine`, `breast_cancer` or `digits`: tables of scikit-learn.
        target: Name of the column that holds the class, for a file.
        validation, test: Share of the rows in each split.
    """

    def __init__(self, source: str, target: str | None = None, *, validation: float = 0.2, test: float = 0.3) -> None:
        check_shares("Tabular", validation, test)
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
        try:
            parts = stratified(targets, self.validation / (1.0 - self.test), self.test)
        except ValueError as error:  # the split would have fewer rows than there are classes
            raise ValueError(f"Tabular: {self.source!r} has too few rows for its classes: {error}") from error
        inputs = np.concatenate([encode_column(column, parts[0]) for column in columns], axis=1)
        numbers, class_numbers = torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets, dtype=torch.int64)
        return TaskData(*(Split(numbers[part], class_numbers[part]) for part in parts), classes=len(classes))

    def _read(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the columns, each [rows] of floats or words, and the labels [rows]."""
        if self.source in BUNDLED:
            x, y = BUNDLED[self.source](return_X_y=True)
            return list(np.asarray(x, dtype=np.float64).T), np.asarray(y)
        path = Path(self.source)
        if not path.is_file():
            raise ValueError(
                f"Tabular: there is no file {self.source!r}; name a .csv file by --data.task.init_args.source, or one "
                f"of {', '.join(BUNDLED)}"
            )
        return read_csv(path, self.target)


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
