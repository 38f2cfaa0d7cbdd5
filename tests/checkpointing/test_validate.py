"""Checkpoints are written atomically, and read only if they are complete and written by this package."""

import shutil
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import save_file

from esper_lightning.runtime.checkpoint import (
    METADATA_KEY,
    AtomicCheckpointIO,
    check_identity,
    read_policy,
)
from tests.runs import Run, fit, load, only_run
from tests.tiers import rest_is_slow

Checkpoint = dict[str, Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("finished")
    fit(root, "--trainer.max_epochs", "1")
    return only_run(root)


def test_a_checkpoint_is_written_and_leaves_no_draft(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.ckpt"

    AtomicCheckpointIO().save_checkpoint({"weights": torch.ones(3)}, target)

    assert torch.equal(load(target)["weights"], torch.ones(3))
    assert list(target.parent.iterdir()) == [target]


def test_a_write_that_fails_half_way_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weights": torch.ones(3)}, target)
    before = target.read_bytes()

    def full_disk(checkpoint: Checkpoint, file: BinaryIO) -> None:
        file.write(b"half of a checkpoint")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(3)}, target)

    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_run_is_continued_by_its_like_alone() -> None:
    ours = {"data.env.horizon": 5, "host": "CNN", "choices of the op head": ["WAIT", "CULL"]}
    check_identity({**ours, "what is known of it besides": 1}, ours)

    for name, value, said in (
        ("data.env.horizon", 6, "the checkpoint has 6, this run 5"),
        ("choices of the op head", ["CULL", "WAIT"], "the checkpoint has"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {said}"):
            check_identity(ours | {name: value}, ours)
    with pytest.raises(ValueError, match="host: the checkpoint has nothing, this run CNN; resume it with the config"):
        check_identity(without(ours, "host"), ours)


@pytest.mark.parametrize("description", ["", "[]", "3", "{}", "[" * 100_000], ids=lambda text: text[:3])
def test_a_policy_file_that_does_not_describe_a_policy_is_refused(description: str, tmp_path: Path) -> None:
    file = tmp_path / "foreign.safetensors"
    save_file({"weights": torch.ones(2)}, file, metadata={METADATA_KEY: description})

    with pytest.raises(ValueError, match=r"foreign\.safetensors'"):
        read_policy(file)


def without(checkpoint: Checkpoint, key: str) -> Checkpoint:
    return {name: part for name, part in checkpoint.items() if name != key}


MISFITS: dict[str, tuple[str, str]] = {
    "other width": ("--model.policy.width=32", "checkpoint"),
    "other slots": ("--data.host.init_args.slots=[block3]", "choices of the slot head"),
    "other features": ("--data.env.sight.hidden=[gap]", "observed features"),
    "other tempos": ("--data.env.actions.tempos={NOW: 1}", "choices of the tempo head"),
    "other host optimizer": ("--data.env.training.optimizer=sgd", "checkpoint"),
    "other horizon": ("--data.env.horizon=4", "horizon"),
}


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    ("flag", "named"),
    rest_is_slow(MISFITS.values(), [MISFITS[name] for name in ("other width", "other slots", "other horizon")]),
    ids=list(MISFITS),
)
def test_a_checkpoint_of_other_settings_ends_in_one_line_and_leaves_its_run_alone(
    flag: str, named: str, finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(Path(shutil.copytree(finished.folder, tmp_path / "version_0")))
    before = {name: (run.folder / name).read_bytes() for name in ("config.yaml", "run.json", "checkpoints/last.ckpt")}

    assert_refused(run.last, named, capsys, flag)

    assert {name: (run.folder / name).read_bytes() for name in before} == before


def assert_refused(checkpoint: Path, named: str, capsys: pytest.CaptureFixture[str], *flags: str) -> None:
    root = checkpoint.parent / "runs"

    with pytest.raises(SystemExit) as ended:
        fit(root, "--ckpt_path", str(checkpoint), *flags)

    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert named in line
