"""run.json says how a run was made, without environment variables."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from esper_lightning.runtime.checkpoint import differences
from esper_lightning.runtime.machine import git_revision
from tests.runs import fit, only_run


def test_a_run_leaves_how_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-of-the-environment")

    fit(tmp_path, "--trainer.max_epochs=1", "--seed_everything=7", "--data.env.executor=loop")

    run = only_run(tmp_path)
    record = json.loads((run.folder / "run.json").read_text())
    assert record["seed"] == 7
    assert record["threads"] == torch.get_num_threads() == 1
    assert (record["device"], record["executor"]) == ("cpu", "loop")
    assert torch.__version__.startswith(record["versions"]["torch"])
    assert set(record) >= {"command", "python", "platform", "processor", "git"}
    assert not any("s3cr3t" in path.read_bytes().decode(errors="ignore") for path in run.folder.rglob("*.*"))


@pytest.mark.slow
def test_what_an_earlier_start_left_is_kept(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=1")
    run = only_run(tmp_path)
    first = (run.folder / "run.json").read_text()

    for epochs in (2, 3):
        fit(tmp_path, f"--trainer.max_epochs={epochs}", f"--ckpt_path={run.last}")

    assert (run.folder / "run.1.json").read_text() == first
    names = {path.name for path in run.folder.iterdir()}
    assert names >= {"run.json", "run.1.json", "run.2.json", "config.yaml"}


def git(folder: Path, *command: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, *command], cwd=folder, check=True, capture_output=True)


def test_the_revision_is_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("1")
    assert git_revision(file) is None  # no repository

    git(tmp_path, "init")
    assert git_revision(file) is None  # another repository, into which the package is installed

    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-m", "a")
    clean = git_revision(file)
    file.write_text("2")

    assert len(clean["commit"]) == 40
    assert clean["changed"] is False
    assert git_revision(file) == clean | {"changed": True}


def test_without_git_there_is_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert git_revision(Path(__file__)) is None


def test_differences_are_a_line_each() -> None:
    before = {"data": {"a": 1, "b": {"c": [1]}, "gone": 3}}
    now = {"data": {"a": 2, "b": {"c": [1]}, "new": True}}

    assert differences(before, now) == [
        "data.a: 1 before, 2 now",
        "data.new: nothing before, True now",
        "data.gone: 3 before, nothing now",
    ]
