"""Text and Source: every target is the next token, and the splits do not overlap."""

import sysconfig
from pathlib import Path

import pytest
import torch

from esper_lightning.tasks import Source, Text, check_data, fingerprint
from esper_lightning.tasks.text import source_files


def written(folder: Path, text: str) -> str:
    path = folder / "some.txt"
    path.write_text(text, encoding="utf-8")
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
    for split in Text(written(tmp_path, alphabet), length=7, validation=0.1, test=0.2).load()[:3]:
        assert torch.equal(split.inputs.flatten()[1:], split.targets.flatten()[:-1])
    stretches = "a" * 700 + "b" * 100 + "c" * 200
    data = Text(written(tmp_path, stretches), length=9, validation=0.1, test=0.2).load()
    assert [split.inputs.unique().tolist() for split in data[:3]] == [[97], [98], [99]]


def test_any_utf8_is_bytes(tmp_path: Path) -> None:
    text = "grüße, 世界! " * 80
    data = Text(written(tmp_path, text), length=5).load()
    assert bytes(data.train.inputs[:3].flatten().tolist()) == text.encode()[:15]


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


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (None, {}, "there is no file '.*missing.txt'; name a file by --data.task.init_args.source, or python"),
        (b"", {}, "a part of the text has 0 tokens, not one sequence of 64; lower length"),
        (b"x" * 1000, {"length": 0}, "not one sequence of 0"),
        (b"x" * 1000, {"validation": 0.6, "test": 0.4}, "leave something to learn from"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_line(
    tmp_path: Path, content: bytes | None, settings: dict, message: str
) -> None:
    path = tmp_path / "missing.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Text(str(path), **settings).load()


def test_no_source_file_is_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = library(tmp_path, monkeypatch, [100] * 20)
    data = Source(length=9, validation=0.1, test=0.2).load()
    for split in data[:3]:
        assert torch.equal(split.inputs.flatten()[1:], split.targets.flatten()[:-1])
    kinds = [set(split.inputs.unique().tolist()) for split in data[:3]]
    assert [len(kind) for kind in kinds] == [14, 2, 4] and len(set().union(*kinds)) == 20
    names = [path.name for path in source_files(root)]
    assert "other.py" not in names and names != sorted(names)


@pytest.mark.parametrize(("sizes", "said"), [([10, 10, 10], "not one sequence of 128"), ([], "has no source of its")])
def test_a_library_that_is_too_short_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], said: str
) -> None:
    library(tmp_path, monkeypatch, sizes)
    with pytest.raises(ValueError, match=said):
        Source().load()
