"""Source: bytes of Python's own code, split by files, mapped into memory and learned as they are."""

import sysconfig
from pathlib import Path

import pytest
import torch

from esper_lightning.tasks import Source, check_data, fingerprint
from esper_lightning.tasks.source import source_files


def library(folder: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> Path:
    """Make a folder with files of these sizes the standard library, each of one repeated byte."""
    root = folder / "lib"
    (root / "site-packages").mkdir(parents=True)
    (root / "site-packages" / "other.py").write_text("!" * 1000)
    for i, size in enumerate(sizes):
        (root / f"file{i}.py").write_bytes(bytes([65 + i]) * size)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def test_the_library_of_this_python_is_mapped_and_not_copied(tmp_path: Path) -> None:
    task = Source(str(tmp_path))
    data = task.load()

    check_data(data, "Source")
    assert data.classes == 256 and data.input_shape == (128,)
    parts = [part for split in data[:3] for part in split]
    assert {part.dtype for part in parts} == {torch.uint8}
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1, "all are views of one mapped file"
    (written,) = tmp_path.iterdir()
    assert parts[0].untyped_storage().nbytes() == written.stat().st_size > 5_000_000
    assert "import" in bytes(data.train.inputs[:50].flatten().tolist()).decode(errors="ignore")
    before = written.stat().st_mtime_ns
    assert fingerprint(Source(str(tmp_path)).load()) == fingerprint(data)
    assert written.stat().st_mtime_ns == before, "it is written once"


def test_targets_are_the_bytes_that_follow_and_no_file_is_in_two_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = library(tmp_path, monkeypatch, [100] * 20)
    data = Source(str(tmp_path / "data"), length=9, validation=0.1, test=0.2).load()

    for split in data[:3]:
        assert torch.equal(split.inputs.flatten()[1:], split.targets.flatten()[:-1])
    kinds = [set(split.inputs.unique().tolist()) for split in data[:3]]
    assert [len(kind) for kind in kinds] == [14, 2, 4]
    assert not kinds[0] & kinds[1] | kinds[0] & kinds[2] | kinds[1] & kinds[2]
    assert "other.py" not in {path.name for path in source_files(root)}
    assert [path.name for path in source_files(root)] != sorted(path.name for path in source_files(root))


def test_a_file_that_was_not_written_to_its_end_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(tmp_path, monkeypatch, [100] * 20)
    first = fingerprint(Source(str(tmp_path / "data"), length=9).load())
    (written,) = (tmp_path / "data").iterdir()
    written.write_bytes(b"half")

    assert fingerprint(Source(str(tmp_path / "data"), length=9).load()) == first


def test_measures_of_bytes_are_those_of_int64(tmp_path: Path) -> None:
    task = Source(str(tmp_path))
    targets = torch.randint(256, (3, 5), dtype=torch.uint8)
    outputs = torch.randn(3, 5, 256)

    assert all(map(torch.equal, task.measure(outputs, targets), super(Source, task).measure(outputs, targets.long())))
    assert task.test_metrics(outputs, targets)["perplexity"] > 1.0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"length": 0}, "length and train must be at least 1, got 0 and None"),
        ({"train": 0}, "length and train must be at least 1, got 128 and 0"),
        ({"validation": 0.0}, "validation and test must be positive"),
        ({"test": 0.96}, "leave something to learn from"),
    ],
)
def test_settings_that_leave_nothing_to_learn_are_refused(settings: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Source(**settings)  # pyright: ignore[reportArgumentType]


def test_parts_that_are_too_short_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path, monkeypatch, [10, 10, 10])

    with pytest.raises(ValueError, match=r"a part has \d+ bytes, not one sequence of 128; lower length"):
        Source(str(tmp_path / "data")).load()


def test_a_python_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path, monkeypatch, [])

    with pytest.raises(ValueError, match="has no source of its standard library; take the task Text"):
        Source(str(tmp_path / "data")).load()
