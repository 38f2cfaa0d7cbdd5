"""Real data sets: fixed splits that do not overlap, scaled by their training samples, and refusals in one line.

A small copy stands for the real CIFAR-10.
"""

import csv
import shutil
import sysconfig
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits
from torchvision.datasets import CIFAR10 as Stored

from esper_lightning.tasks import (
    CIFAR10,
    Digits,
    Glyphs,
    Source,
    Split,
    Tabular,
    TaskData,
    Text,
    check_data,
    fingerprint,
)
from esper_lightning.tasks.data_sets import source_files
from tests.runs import cli
from tests.tasks.stored import pack_cifar10, write_cifar10

EACH = 12
"""Number of images in each of the five training files, and in the test file."""


@pytest.fixture(scope="module")
def digits() -> TaskData:
    return Digits().load()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small data set in the real format."""
    return write_cifar10(tmp_path, monkeypatch, EACH)


def test_no_digit_is_in_two_parts_and_none_is_lost(digits: TaskData) -> None:
    check_data(digits, "Digits")
    images, labels = load_digits(return_X_y=True)
    known = np.concatenate([images, labels[:, None]], 1).astype(np.int64)
    low, high = digits.train.inputs.min(), digits.train.inputs.max()

    def pictures(split: Split) -> list[bytes]:
        grey = ((split.inputs - low) / (high - low) * 16).round().to(torch.int64).flatten(1)
        return [row.tobytes() for row in torch.cat([grey, split.targets[:, None]], 1).numpy()]

    assert [split.samples for split in digits[:3]] == [897, 200, 700]
    assert Counter(chain(*map(pictures, digits[:3]))) == Counter(row.tobytes() for row in known)


def test_every_load_of_digits_gives_the_same_stratified_split(digits: TaskData) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    whole = torch.cat([split.targets for split in digits[:3]]).bincount() / 1797
    for split, again in zip(digits[:3], Digits().load()[:3], strict=True):
        assert torch.equal(split.inputs, again.inputs) and torch.equal(split.targets, again.targets)
        assert (split.targets.bincount(minlength=10) / split.samples - whole).abs().max() < 0.006
    train = digits.train.inputs.double()
    assert (train.mean().item(), train.std().item()) == pytest.approx((0.0, 1.0), abs=1e-5)


def test_cifar10_is_split_and_scaled_by_the_images_that_are_learned_from(root: Path) -> None:
    data = CIFAR10(str(root), validation=10).load()
    check_data(data, "CIFAR10")
    assert [split.samples for split in data[:3]] == [5 * EACH - 10, 10, EACH]
    assert data.input_shape == (3, 32, 32) and data.outputs == 10
    batch = data.train.batch().inputs
    assert batch.mean((0, 2, 3)).abs().max() < 1e-4
    assert (batch.std((0, 2, 3), correction=0) - 1.0).abs().max() < 1e-4
    assert len({image.sum().item() for split in data[:3] for image in split.inputs}) == 6 * EACH, "none is in two"

    stored = Stored(root, train=False)
    assert data.test.targets.tolist() == stored.targets
    pixels = torch.tensor(stored.data).permute(0, 3, 1, 2)
    assert data.train.inputs.dtype is torch.uint8
    learned = data.train.inputs.double()
    mean, deviation = learned.mean((0, 2, 3), keepdim=True), learned.std((0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(data.test.batch().inputs, ((pixels - mean) / deviation).float())


def offline(*_: object, **__: object) -> None:
    raise URLError("host unreachable")


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_missing_or_damaged_file_is_refused_and_the_way_out_leads_out(
    name: str, damage: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = CIFAR10(str(root), validation=10).load()
    pack_cifar10(root, monkeypatch)
    monkeypatch.setattr("urllib.request.urlopen", offline)
    CIFAR10(str(root), validation=10, download=True).load()  # unpacks the archive, without a network
    path = root / Stored.base_folder / name
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content[:-1] if damage == "short" else content)
    if damage == "missing":
        path.unlink()

    with pytest.raises(ValueError, match=r"^CIFAR10: no sound .*; give --data.task.init_args.download true .*170 MB"):
        CIFAR10(str(root), validation=10).load()
    if name == "batches.meta":  # torchvision does not miss it when it is asked to download
        with pytest.raises(ValueError, match=f"; remove {path.parent}, and without a network put cifar-10-python"):
            CIFAR10(str(root), validation=10, download=True).load()
        shutil.rmtree(path.parent)
    again = CIFAR10(str(root), validation=10, download=True).load()
    assert all(torch.equal(one.inputs, other.inputs) for one, other in zip(whole[:3], again[:3], strict=True))


def test_a_download_that_fails_is_told_in_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", offline)
    empty = root / "empty"
    flags = (f"--data.task.init_args.root={empty}", "--data.task.init_args.download=true", "--trainer.accelerator=cpu")
    with pytest.raises(SystemExit) as ended:
        cli("--config", "cifar10", f"--trainer.default_root_dir={root / 'runs'}", *flags)

    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"error: CIFAR10: no sound data set in {str(empty)!r} (<urlopen error host unreachable>)")


ROWS = 60
TABLE: list[list[object]] = [[i, i % 2] for i in range(ROWS)]


def written(folder: Path, header: list[str], rows: list[list[object]]) -> str:
    path = folder / "some.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def test_a_bundled_table_is_scaled_by_its_training_rows() -> None:
    data = Tabular("wine").load()

    check_data(data, "Tabular")
    assert data.input_shape == (13,) and data.outputs == 3
    assert [split.samples for split in data[:3]] == [88, 36, 54], "a half, a fifth and three tenths of 178"
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

    rare = Tabular(
        written(tmp_path, ["word", "class"], [[f"word{i}", i % 2] for i in range(ROWS)]), target="class"
    ).load()
    assert rare.input_shape[0] <= 32 and rare.test.inputs.isfinite().all(), "training never saw most of these words"


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


def text(folder: Path, content: str) -> str:
    path = folder / "some.txt"
    path.write_text(content, encoding="utf-8")
    return str(path)


def library(folder: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> Path:
    """Make a folder with files of these sizes the standard library, each of one repeated byte."""
    root = folder / "lib"
    (root / "site-packages").mkdir(parents=True)
    (root / "site-packages" / "other.py").write_text("!" * 1000)
    for i, size in enumerate(sizes):
        (root / f"file{i}.py").write_bytes(bytes([65 + i]) * size)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def test_the_reference_and_the_library_of_python_are_there_without_a_download() -> None:
    for task, length in ((Text(), 64), (Source(), 128)):
        data = task.load()
        check_data(data, type(task).__name__)
        assert data.outputs == 256 and data.input_shape == (length,) and data.train.samples > 5000
        assert "import" in bytes(data.train.inputs[:3000].flatten().tolist()).decode(errors="ignore")
        assert fingerprint(task.load()) == fingerprint(data)


def test_splits_are_stretches_of_the_text_whose_targets_are_the_tokens_that_follow(tmp_path: Path) -> None:
    alphabet = "".join(chr(ord("a") + i % 26) for i in range(1000))
    for split in Text(text(tmp_path, alphabet), length=7, validation=0.1, test=0.2).load()[:3]:
        assert torch.equal(split.inputs.flatten()[1:], split.targets.flatten()[:-1])
    stretches = "a" * 700 + "b" * 100 + "c" * 200
    data = Text(text(tmp_path, stretches), length=9, validation=0.1, test=0.2).load()
    assert [split.inputs.unique().tolist() for split in data[:3]] == [[97], [98], [99]]


def test_any_utf8_is_bytes(tmp_path: Path) -> None:
    said = "grüße, 世界! " * 80
    data = Text(text(tmp_path, said), length=5).load()
    assert bytes(data.train.inputs[:3].flatten().tolist()) == said.encode()[:15]


def test_a_file_of_gigabytes_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**34)  # 16 GB without content, which take no space
        file.seek(5 * 2**30)
        file.write(b"abcdefghij")
    data = Text(str(path), length=2**10).load()

    batch = data.train.batch(torch.tensor([5 * 2**20, 0]))

    assert bytes(batch.inputs[0, :10].tolist()) == b"abcdefghij" == bytes([97, *batch.targets[0, :9].tolist()])
    assert batch.inputs.dtype is batch.targets.dtype is torch.int64 and not batch.inputs[1].any()


def test_no_source_file_is_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = library(tmp_path, monkeypatch, [100] * 20)
    data = Source(length=9, validation=0.1, test=0.2).load()
    for split in data[:3]:
        assert torch.equal(split.inputs.flatten()[1:], split.targets.flatten()[:-1])
    kinds = [set(split.inputs.unique().tolist()) for split in data[:3]]
    assert [len(kind) for kind in kinds] == [14, 2, 4] and len(set().union(*kinds)) == 20
    names = [path.name for path in source_files(root)]
    assert "other.py" not in names and names != sorted(names)


COLUMNS = ["a", "b"]
LATIN_1 = [["ä".encode("latin-1").decode("latin-1") * 200_000, 1]]


@pytest.mark.parametrize(
    ("header", "rows", "settings", "message"),
    [
        (COLUMNS, TABLE, {}, "no column None to learn, .*; --data.task.init_args.target names one of a, b"),
        (COLUMNS, TABLE, {"target": "c"}, "no column 'c' to learn"),
        (COLUMNS, [], {"target": "b"}, "has no rows"),
        (["a", "a", "b"], [[1, *row] for row in TABLE], {"target": "b"}, "or a name twice"),
        (COLUMNS, [*TABLE, [1]], {"target": "a"}, "line 62: 1 cells for 2 columns"),
        (COLUMNS, [*TABLE, [1, ""]], {"target": "b"}, "line 62: 2 cells for 2 columns, or no b"),
        (COLUMNS, TABLE, {"target": "a"}, "has 60 classes, the rarest of 1 rows"),
        (COLUMNS, TABLE, {"target": "b", "test": 0.9, "validation": 0.1}, "leave something to learn from"),
        (COLUMNS, TABLE[:7], {"target": "b", "test": 0.1}, "has too few rows for its classes"),
        (COLUMNS, LATIN_1, {"target": "b"}, "is no CSV in UTF-8"),
        (COLUMNS, [[1, "red"], [2, "blue"]], {"target": "b", "score": "r2"}, "score r2 needs a target of numbers"),
        (COLUMNS, [[i, 7] for i in range(20)], {"target": "b", "score": "r2"}, "constant or not finite"),
    ],
)
def test_what_is_no_table_of_classes_or_quantities_is_refused_in_a_line(
    tmp_path: Path, header: list[str], rows: list[list[object]], settings: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Tabular(written(tmp_path, header, rows), **settings).load()


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Digits, {"validation": 9}, "^digits: validation and test need .* got 9 and 700$"),
        (Digits, {"test": 9}, "got 200 and 9$"),
        (Digits, {"test": 1588}, "got 200 and 1588$"),
        (Glyphs, {"level": "simple"}, "^Glyphs: .*choose one of mild, easy"),
        (Glyphs, {"train": 0}, "^Glyphs: .*at least 1 image"),
        (CIFAR10, {"root": "", "validation": 60}, "validation must be at least 1 of 60 images, got 60"),
        (Tabular, {"source": "missing.csv"}, "there is no file 'missing.csv'; name a .csv file .* wine, breast"),
        (
            Text,
            {"source": "missing.txt"},
            "there is no file 'missing.txt'; name a file by --data.task.init_args.source",
        ),
        (Text, {"source": "empty"}, "a part of the text has 0 tokens, not one sequence of 64; lower length"),
        (Text, {"length": 0}, "not one sequence of 0"),
        (Text, {"validation": 0.6, "test": 0.4}, "leave something to learn from"),
        (Source, {}, "has no source of its standard library"),
        (Source, {"length": 999}, "not one sequence of 999"),
    ],
)
def test_what_cannot_be_read_or_divided_is_refused_in_a_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, make: Any, settings: dict, message: str
) -> None:
    monkeypatch.chdir(root)
    Path("empty").touch()
    library(root, monkeypatch, [10, 10, 10] if settings else [])
    with pytest.raises(ValueError, match=message):
        make(**settings).load()
