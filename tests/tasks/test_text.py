"""Text: every target is the next token, and the splits do not overlap."""

import sys
from pathlib import Path

import pytest
import torch

from esper_lightning.tasks import Text, check_data


def written(folder: Path, text: str) -> str:
    path = folder / "some.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_reference_of_python_is_there_without_a_download() -> None:
    data = Text().load()

    check_data(data, "Text")
    assert data.classes == 256 and data.input_shape == (64,)
    assert data.train.samples > 5000
    assert "import" in bytes(data.train.inputs.flatten().tolist()).decode(errors="ignore")


def test_targets_are_the_tokens_that_follow(tmp_path: Path) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(1000))
    data = Text(written(tmp_path, text), length=7, validation=0.1, test=0.2).load()

    for split in data[:3]:
        assert torch.equal(split.inputs[:, 1:], split.targets[:, :-1])
        assert torch.equal(split.inputs.flatten()[1:], split.targets.flatten()[:-1]), "also from one to the next"


def test_splits_are_stretches_of_the_text_one_after_the_other(tmp_path: Path) -> None:
    text = "a" * 700 + "b" * 100 + "c" * 200
    data = Text(written(tmp_path, text), length=9, validation=0.1, test=0.2).load()

    assert [split.inputs.unique().tolist() for split in data[:3]] == [[ord("a")], [ord("b")], [ord("c")]]


@pytest.mark.parametrize("text", ["grüße, 世界! " * 80])
def test_any_utf8_is_bytes(tmp_path: Path, text: str) -> None:
    data = Text(written(tmp_path, text), length=5).load()

    assert bytes(data.train.inputs[:3].flatten().tolist()) == text.encode()[:15]


def test_byte_pairs_are_learned_from_the_training_part_alone(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = "growing networks " * 300 + "quartz jukebox " * 100
    data = Text(written(tmp_path, text), tokens="bpe", vocabulary=300, length=8, validation=0.1, test=0.1).load()

    check_data(data, "Text")
    assert data.classes == 300
    assert data.train.inputs.max() >= 256, "pieces of words"
    assert data.test.inputs.max() < 256 + 60


def test_without_the_package_byte_pairs_are_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(ValueError, match="bpe needs the package tokenizers; pip install tokenizers, or use bytes"):
        Text(tokens="bpe").load()


def test_fewer_sequences_to_learn_from_leave_the_others_alone(tmp_path: Path) -> None:
    source = written(tmp_path, "0123456789" * 200)
    few, all_of_them = Text(source, length=10, train=3).load(), Text(source, length=10).load()

    assert few.train.samples == 3
    assert torch.equal(few.test.inputs, all_of_them.test.inputs)


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (None, {}, "there is no file '.*missing.txt'; name a UTF-8 file by --data.task.init_args.source, or python"),
        (b"", {}, "is empty; name another file"),
        (b"\xff\xfe", {}, "is not UTF-8"),
        (b"short", {}, "is too short: a part of it has"),
        (b"x" * 1000, {"length": 0}, "length and train must be at least 1"),
        (b"x" * 1000, {"validation": 0.6, "test": 0.4}, "leave something to learn from"),
        (b"x" * 1000, {"tokens": "bpe", "vocabulary": 256}, "has more than 256 tokens"),
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


def test_a_device_is_no_text() -> None:
    with pytest.raises(ValueError, match="there is no file '/dev/null'"):
        Text("/dev/null").load()


def test_a_text_larger_than_the_memory_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "some.txt").open("wb") as file:
        file.truncate(10**12)

    with pytest.raises(ValueError, match=r"^Text: reading the 1000000000000 bytes of .* needs at least \d+\.\d GiB"):
        Text(str(tmp_path / "some.txt")).load()


def test_a_file_of_proc_whose_size_is_unknown_is_no_text() -> None:
    with pytest.raises(ValueError, match="'/proc/self/pagemap' is empty"):
        Text("/proc/self/pagemap").load()
