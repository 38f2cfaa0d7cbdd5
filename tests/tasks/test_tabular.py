"""Tabular data: numbers and words are encoded with statistics of the training rows only."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes

from esper_lightning.tasks import Tabular, check_data

ROWS = 60
TABLE: list[list[object]] = [[i, i % 2] for i in range(ROWS)]


def written(folder: Path, header: list[str], rows: list[list[object]]) -> str:
    path = folder / "some.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


@pytest.mark.parametrize(("source", "columns", "classes"), [("wine", 13, 3), ("breast_cancer", 30, 2)])
def test_bundled_tables_are_scaled_by_their_training_rows(source: str, columns: int, classes: int) -> None:
    data = Tabular(source).load()

    check_data(data, "Tabular")
    assert data.input_shape == (columns,) and data.outputs == classes
    assert data.train.inputs.mean(0).abs().max() < 1e-5
    assert (data.train.inputs.std(0, correction=0) - 1.0).abs().max() < 1e-5
    assert data.test.inputs.mean(0).abs().max() > 1e-3, "test data do not affect the normalisation"
    shares = [torch.bincount(split.targets) / split.samples for split in data[:3]]
    assert all((share - shares[0]).abs().max() < 0.03 for share in shares), "splits are stratified"


def test_words_become_columns_and_what_is_missing_the_median(tmp_path: Path) -> None:
    rows: list[list[object]] = [
        [i if i % 10 else "", "", "red" if i % 2 else "blue", "yes" if i % 3 else "no"] for i in range(ROWS)
    ]
    data = Tabular(written(tmp_path, ["size", "nothing", "colour", "good"], rows), target="good").load()

    check_data(data, "Tabular")
    assert data.input_shape == (4,), "two columns of numbers, two words"
    assert not data.train.inputs[:, 1].any(), "a column without a value says nothing"
    words = data.train.inputs[:, 2:]
    assert set(words.flatten().tolist()) == {0.0, 1.0} and torch.equal(words.sum(1), torch.ones(len(words)))


def test_a_word_that_training_never_saw_is_none_of_those_it_knows(tmp_path: Path) -> None:
    rows: list[list[object]] = [[f"word{i}", i % 2] for i in range(ROWS)]
    data = Tabular(written(tmp_path, ["word", "class"], rows), target="class").load()

    assert data.input_shape[0] <= 32
    assert torch.isfinite(data.test.inputs).all()


@pytest.mark.parametrize(
    ("header", "rows", "settings", "message"),
    [
        (["a", "b"], TABLE, {}, "no column None to learn, .*; --data.task.init_args.target names one of a, b"),
        (["a", "b"], TABLE, {"target": "c"}, "no column 'c' to learn"),
        (["a", "b"], [], {"target": "b"}, "has no rows"),
        (["a", "a", "b"], [[1, *row] for row in TABLE], {"target": "b"}, "or a name twice"),
        (["a", "b"], [*TABLE, [1]], {"target": "a"}, "line 62: 1 cells for 2 columns"),
        (["a", "b"], [*TABLE, [1, ""]], {"target": "b"}, "line 62: 2 cells for 2 columns, or no b"),
        (["a", "b"], TABLE, {"target": "a"}, "has 60 classes, the rarest of 1 rows"),
        (["a", "b"], TABLE, {"target": "b", "test": 0.9, "validation": 0.1}, "leave something to learn from"),
        (["a", "b"], TABLE[:7], {"target": "b", "test": 0.1}, "has too few rows for its classes"),
        (["a", "b"], [["ä".encode("latin-1").decode("latin-1") * 200_000, 1]], {"target": "b"}, "is no CSV in UTF-8"),
    ],
)
def test_what_is_no_table_of_classes_is_refused_in_a_line(
    tmp_path: Path, header: list[str], rows: list[list[object]], settings: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Tabular(written(tmp_path, header, rows), **settings).load()


def test_a_quantity_is_scaled_by_its_training_rows() -> None:
    task = Tabular("diabetes", score="r2")
    data = task.load()
    check_data(data, "Tabular", task.score)

    _, values = load_diabetes(return_X_y=True)
    scaled = torch.cat([split.targets for split in data[:3]])
    assert data.outputs == 1 and data.input_shape == (10,) and data.chance_loss == 1.0
    assert data.train.targets.mean().abs() < 1e-5 and data.train.targets.std(correction=0).item() == pytest.approx(1.0)
    spread = np.ptp(values) / np.ptp(scaled.numpy())
    mean = values.min() - spread * scaled.min().item()
    np.testing.assert_allclose(np.sort(spread * scaled.numpy() + mean), np.sort(values), rtol=1e-3)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[1, "red"], [2, "blue"], [3, "red"]], "score r2 needs a target of numbers"),
        ([[i, 7] for i in range(20)], "constant or not finite"),
    ],
)
def test_what_is_no_quantity_is_refused_in_a_line(tmp_path: Path, rows: list[list[object]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Tabular(written(tmp_path, ["a", "b"], rows), "b", score="r2").load()


def test_a_missing_file_is_refused_in_a_line() -> None:
    with pytest.raises(ValueError, match=r"there is no file 'missing.csv'; name a .csv file .* wine, breast"):
        Tabular("missing.csv").load()
