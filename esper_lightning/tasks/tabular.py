"""A class or a quantity of table rows, from a CSV file or a data set of scikit-learn."""

import csv
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from esper_lightning.tasks.images import stratified
from esper_lightning.tasks.task import Score, Split, Task, TaskData
from esper_lightning.tasks.text import check_shares

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
        self.source = source
        self.target = target
        self.validation = validation
        self.test = test

    def load(self) -> TaskData:
        columns, labels = self._read()
        if self.score == "r2":
            return self._quantity(columns, labels)
        classes, targets = np.unique(labels, return_inverse=True)
        rarest = np.bincount(targets).min()
        if len(classes) < 2 or rarest < 3:
            raise ValueError(
                f"Tabular: {self.source!r} has {len(classes)} classes, the rarest of {rarest} rows; each class needs 3 "
                "rows at least; a target that is a quantity needs --data.task.init_args.score r2"
            )
        try:
            parts = stratified(targets, self.validation / (1.0 - self.test), self.test)
        except ValueError as error:  # the split would have fewer rows than there are classes
            raise ValueError(f"Tabular: {self.source!r} has too few rows for its classes: {error}") from error
        return table_data(columns, torch.tensor(targets, dtype=torch.int64), parts, outputs=len(classes))

    def _quantity(self, columns: list[np.ndarray], labels: np.ndarray) -> TaskData:
        """Return the data with labels that are quantities, scaled like inputs. Raises ValueError if they are none."""
        try:
            values = labels.astype(float)
        except ValueError as error:
            raise ValueError(f"Tabular: the score r2 needs a target of numbers: {error}") from error
        if not np.isfinite(values).all() or len(set(values)) < 3:
            raise ValueError(f"Tabular: the target of {self.source!r} is constant or not finite; name a quantity")
        parts = stratified(values, self.validation / (1.0 - self.test), self.test)
        targets = np.asarray(StandardScaler().fit(values[parts[0], None]).transform(values[:, None]))[:, 0]
        return table_data(columns, torch.tensor(targets, dtype=torch.float32), parts, outputs=1)

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


def table_data(
    columns: list[np.ndarray], targets: torch.Tensor, parts: tuple[np.ndarray, ...], *, outputs: int
) -> TaskData:
    """Return the data of encoded columns, with the rows `parts` for training, validation and test."""
    inputs = torch.tensor(np.concatenate([encode_column(c, parts[0]) for c in columns], axis=1), dtype=torch.float32)
    return TaskData(*(Split(inputs[part], targets[part]) for part in parts), outputs=outputs)


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
