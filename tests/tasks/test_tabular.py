"""Tabular data: numbers and words are encoded with statistics of the training rows only."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from esper_lightning.tasks import Tabular, check_data

ROWS = 60


def written(folder: Path, header: list[str], rows: list[list[object]]) -> str:
    path = folder / "some.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


@pytest.mark.parametrize(("source", "columns", "classes"), [("wine", 13, 3), ("breast_cancer", 30, 2)])
def test_bundled_tables_are_scaled_by_their_training_rows(source: str, columns: int, classes: int) -> None:
    data = Tabular(source).load()

    check_data(data, "Tabular")
    assert data.input_shape == (columns,) and data.classes == classes
    assert data.train.inputs.mean(0).abs().max() < 1e-5
    assert (data.train.inputs.std(0, correction=0) - 1.0).abs().max() < 1e-5
    assert data.test.inputs.mean(0).abs().max() > 1e-3, "test data do not affect the normalisation"


def test_every_class_is_in_every_split_in_its_share() -> None:
    data = Tabular("wine").load()

    shares = [torch.bincount(split.targets) / split.samples for split in data[:3]]
    for share in shares[1:]:
        assert (share - shares[0]).abs().max() < 0.03


def test_words_become_columns_and_what_is_missing_the_median(tmp_path: Path) -> None:
    rows = [[i if i % 10 else "", "red" if i % 2 else "blue", "yes" if i % 3 else "no"] for i in range(ROWS)]
    data = Tabular(written(tmp_path, ["size", "colour", "good"], rows), target="good").load()

    check_data(data, "Tabular")
    assert data.input_shape == (3,), "one number, two words"
    words = data.train.inputs[:, 1:]
    assert set(words.flatten().tolist()) == {0.0, 1.0} and torch.equal(words.sum(1), torch.ones(len(words)))


def test_a_word_that_training_never_saw_is_none_of_those_it_knows(tmp_path: Path) -> None:
    rows = [[f"word{i}", i % 2] for i in range(ROWS)]
    data = Tabular(written(tmp_path, ["word", "class"], rows), target="class").load()

    assert data.input_shape[0] <= 32
    assert torch.isfinite(data.test.inputs).all()


def test_arrays_are_taken_as_they_are(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(ROWS, 4)), np.arange(ROWS) % 3
    np.savez(tmp_path / "some.npz", x=x, y=y)
    data = Tabular(str(tmp_path / "some.npz")).load()

    assert data.input_shape == (4,) and data.classes == 3
    assert sum(split.samples for split in data[:3]) == ROWS


TABLE = [[i, i % 2] for i in range(ROWS)]


@pytest.mark.parametrize(
    ("header", "rows", "settings", "message"),
    [
        (["a", "b"], TABLE, {}, "has no column None to learn; --data.task.init_args.target names one of a, b"),
        (["a", "b"], TABLE, {"target": "c"}, "has no column 'c' to learn"),
        (["a", "b"], [*TABLE, [1]], {"target": "b"}, "line 62: 1 cells, 2 columns"),
        (["a", "b"], [*TABLE, [1, ""]], {"target": "b"}, "1 rows have no b; leave them out"),
        (["a", "b"], TABLE, {"target": "a"}, "has 60 classes, the rarest of 1 rows"),
        (["a", "b"], TABLE, {"target": "b", "test": 0.9, "validation": 0.1}, "leave rows to learn from"),
        (["a", "a", "b"], [[1, *row] for row in TABLE], {"target": "b"}, "2 columns are called 'a'; rename or remove"),
        (["a", "b", "b"], [[*row, 1] for row in TABLE], {"target": "b"}, "2 columns are called 'b'; rename or remove"),
        (["", "", "b"], [[1, *row] for row in TABLE], {"target": "b"}, "2 columns are called ''; rename or remove"),
        (["a", "b"], [*TABLE, ["x\0y", 1]], {"target": "b"}, "line 62: a NUL character; the file is damaged"),
        (["a\0", "b"], TABLE, {"target": "b"}, "line 1: a NUL character; the file is damaged"),
        (["a", "c", "b"], [[i, "", c] for i, c in TABLE], {"target": "b"}, "column 'c' has no value in the training"),
        (
            ["a", "c", "b"],
            [[i, "nan", c] for i, c in TABLE],
            {"target": "b"},
            "column 'c' has no value in the training",
        ),
    ],
)
def test_what_is_no_table_of_classes_is_refused_in_a_line(
    tmp_path: Path, header: list[str], rows: list[list[object]], settings: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Tabular(written(tmp_path, header, rows), **settings).load()


def test_an_empty_file_is_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("")

    with pytest.raises(ValueError, match=r"empty.csv' has no header line; the first line must name the columns"):
        Tabular(str(path), target="b").load()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((4, 2))}, "holds x; it needs x and y"),
        ({"x": np.zeros(4), "y": np.zeros(4)}, r"need \[rows, columns\] and \[rows\]"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(5)}, r"need \[rows, columns\] and \[rows\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "some.npz", **arrays)

    with pytest.raises(ValueError, match=message):
        Tabular(str(tmp_path / "some.npz")).load()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.98])
def test_a_truncated_file_of_arrays_is_refused_in_a_line(tmp_path: Path, share: float) -> None:
    path = tmp_path / "some.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).normal(size=(200, 3)), y=np.arange(200) % 2)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])

    with pytest.raises(ValueError, match=r"some\.npz' is damaged: .*; get the file again"):
        Tabular(str(path)).load()


def test_a_column_without_a_value_in_the_training_rows_is_refused(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(ROWS, 3)), np.arange(ROWS) % 3
    x[:, 1] = np.nan
    np.savez(tmp_path / "some.npz", x=x, y=y)
    with pytest.raises(ValueError, match=r"some\.npz': column '1' has no value in the training rows; leave it out"):
        Tabular(str(tmp_path / "some.npz")).load()


def test_a_file_that_is_not_there_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"there is no file 'missing.csv'; name a .csv or .npz file .* wine, breast"):
        Tabular("missing.csv").load()
