"""Tabular data: numbers and words are encoded with statistics of the training rows only."""

import csv
import io
import os
import time
import zipfile
from pathlib import Path
from typing import Any

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


LABELS = b"".join(b"1,%d\n" % (i % 2) for i in range(ROWS))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; name another file"),
        (b"\n", "has no header line; the first line must name the columns"),
        (b"a,b\n", "has a header line and no rows; get the file again"),
        ("ä,b\n1,2\n".encode("latin-1"), r"is no CSV in UTF-8 \(.*codec.*\); save it as such"),
        (b"a,b\n" + b"x" * 200_000 + b",1\n", r"is no CSV in UTF-8 \(field larger than"),
        (b"a,b\ninf,1\n" + LABELS, "column 'a' holds inf in row 1, and numbers up to"),
        (b"a,b\n1e308,1\n" + LABELS, r"column 'a' holds 1e\+308 in row 1, and numbers up to"),
        (b",".join(b"c%d" % i for i in range(10_001)) + b",b\n", "has 10002 columns, more than 10000"),
        (b",".join(b"c%d" % i for i in range(10_001)) + b"\n", r"has no column 'b' to learn; .* one of c0, .*, c49$"),
    ],
)
def test_a_file_that_is_no_table_of_numbers_and_words_is_refused_in_a_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "some.csv").write_bytes(content)

    with pytest.raises(ValueError, match=rf"^Tabular: '.*some\.csv' {message}|: {message}"):
        Tabular(str(tmp_path / "some.csv"), target="b").load()


def test_one_long_word_does_not_lengthen_the_others(tmp_path: Path) -> None:
    """An array of texts of fixed width would take 130,000 characters for every cell: 20 GB."""
    rows = [["x" * 130_000, 1], *([["a", i % 2] for i in range(40_000)])]
    data = Tabular(written(tmp_path, ["word", "b"], rows), target="b").load()

    assert sum(split.samples for split in data[:3]) == 40_001


@pytest.mark.parametrize("name", ["some.csv", "some.npz"])
def test_a_file_larger_than_the_memory_is_not_read(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(10**12)
    started = time.process_time()

    with pytest.raises(ValueError, match=r"needs at least \d+\.\d GiB|is damaged"):
        Tabular(str(tmp_path / name), target="b").load()
    assert time.process_time() - started < 5.0


def test_a_pipe_is_no_table(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "some.csv")

    with pytest.raises(ValueError, match="there is no file"):
        Tabular(str(tmp_path / "some.csv"), target="b").load()


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


def saved(path: Path, compression: int = zipfile.ZIP_STORED, **arrays: tuple[str, tuple[int, ...], bytes]) -> str:
    """Write an .npz file of arrays with the given type, shape and content, which need not fit together."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, (descr, shape, content) in arrays.items():
            np.lib.format.write_array_header_1_0(
                header := io.BytesIO(), {"descr": descr, "fortran_order": False, "shape": shape}
            )
            archive.writestr(f"{name}.npy", header.getvalue() + content)
    return str(path)


NUMBERS = ("<f8", (ROWS, 2), np.random.default_rng(0).normal(size=(ROWS, 2)).tobytes())
CLASSES = ("<i8", (ROWS,), (np.arange(ROWS) % 3).astype("<i8").tobytes())


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": ("<f8", (10**12, 2), NUMBERS[2])}, "is damaged: x is shorter than its shape"),
        ({"x": ("<f8", (-ROWS, -2), NUMBERS[2])}, "is damaged: x is shorter than its shape"),
        ({"y": ("|S0", (10**12,), b"")}, "is damaged: y is shorter than its shape"),
        ({"x": ("|O", (ROWS, 2), b"")}, "x holds object; save numbers"),
        ({"x": ("<c16", (ROWS, 1), NUMBERS[2])}, "x holds complex128; save numbers"),
        ({"x": ("<U4", (ROWS, 1), NUMBERS[2])}, "x holds <U4; save numbers"),
        ({"x": ("<M8[s]", (ROWS, 2), NUMBERS[2])}, r"x holds datetime64\[s\]; save numbers"),
        ({"y": ("|O", (ROWS,), b"")}, "y holds object; save numbers or texts"),
        ({"x": ("<f8", (ROWS, 0), b"")}, r"they need \[rows, columns\] and \[rows\]"),
        ({"y": ("<f8", (ROWS,), np.full(ROWS, np.nan).tobytes())}, "60 rows have no label in y"),
        (
            {"x": ("<f8", (ROWS, 2), np.full((ROWS, 2), np.inf).tobytes())},
            "column '0' holds inf in row 1, and numbers up to",
        ),
    ],
)
def test_arrays_of_another_kind_are_refused_by_their_headers(
    tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    path = saved(tmp_path / "some.npz", **({"x": NUMBERS, "y": CLASSES} | arrays))

    with pytest.raises(ValueError, match=message):
        Tabular(path).load()


def test_a_small_file_that_unpacks_to_more_than_the_memory_is_refused_before_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = ("|i1", (10**7, 1), bytes(10**7))
    path = saved(tmp_path / "some.npz", zipfile.ZIP_DEFLATED, x=x, y=("|i1", (10**7,), bytes(10**7)))
    assert Path(path).stat().st_size < 50_000
    monkeypatch.setattr("esper_lightning.machine.total_memory", lambda device: 2**28)

    with pytest.raises(ValueError, match=r"the arrays in '.*some\.npz' need at least 0\.6 GiB, and cpu has 0\.2 GiB"):
        Tabular(path).load()


def test_a_file_that_is_compressed_by_another_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compressed by another method"):
        Tabular(saved(tmp_path / "some.npz", zipfile.ZIP_BZIP2, x=NUMBERS, y=CLASSES)).load()


@pytest.mark.parametrize("content", [b"junk", b"\x93NUMPY\x01\x00\x28\x23" + b"(" * 8999 + b"\n", b"\x93NUMPY\x09\x00"])
def test_what_is_no_array_of_numpy_is_refused(tmp_path: Path, content: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "some.npz", "w") as archive:
        for name in ("x.npy", "y.npy"):
            archive.writestr(name, content)

    with pytest.raises(ValueError, match=r"some\.npz': x is no array of numpy: .*; save it by numpy\.savez"):
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
