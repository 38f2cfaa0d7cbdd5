"""Replaced files are whole at any moment, and the drafts of other processes stay."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper_lightning.serialization.replace import replace_and_keep, replace_durably, set_aside
from tests.processes import forked


class Killed(BaseException):
    """Stands for the end of the process."""


STEPS = {"copied": (shutil, "copy2"), "flushed": (os, "fsync"), "renamed": (Path, "replace")}
"""Functions after which a process may be killed, by what they have done then."""


def kill_at(number: int, step: str, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    """Raise `Killed` before or after a function is called for the `number`-th time."""
    owner, name = STEPS[step]
    original, calls = getattr(owner, name), []

    def killing(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if not after and len(calls) == number:
            raise Killed
        result = original(*args, **options)
        if after and len(calls) == number:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, killing)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("step", "number"), [("copied", 1), ("renamed", 1), ("flushed", 1), ("renamed", 2)])
def test_a_config_is_whole_whenever_a_process_is_killed_that_replaces_it(
    step: str, number: int, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old" * 1000)
    kill_at(number, step, monkeypatch, after=after)
    with pytest.raises(Killed):
        replace_and_keep(path, "new" * 2000)
    assert path.read_text() in ("old" * 1000, "new" * 2000)
    monkeypatch.undo()

    replace_and_keep(path, "newer")

    assert path.read_text() == "newer"
    earlier = [file.read_text() for file in tmp_path.glob("config.*.yaml")]
    assert set(earlier) <= {"old" * 1000, "new" * 2000} and "old" * 1000 in earlier


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere")])
def test_what_is_set_aside_gets_the_next_number(make: Callable[[Path], None], tmp_path: Path) -> None:
    for _ in range(2):
        make(tmp_path / "run.json")
        set_aside(tmp_path / "run.json")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.1.json", "run.2.json"]


def test_a_link_is_replaced_and_kept_as_a_link_and_its_target_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "dear").write_text("dear")
    for name in ("dear", "nowhere"):
        (tmp_path / "run.json").unlink(missing_ok=True)
        (tmp_path / "run.json").symlink_to(name)
        replace_and_keep(tmp_path / "run.json", "{}")

    assert (tmp_path / "dear").read_text() == "dear"
    assert (tmp_path / "run.json").read_text() == "{}" and not (tmp_path / "run.json").is_symlink()
    assert [(tmp_path / f"run.{n}.json").readlink().name for n in (1, 2)] == ["dear", "nowhere"]
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["a folder", "a pipe"])
def test_what_is_no_file_is_set_aside(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "run.json")
    replace_and_keep(tmp_path / "run.json", "{}")
    assert (tmp_path / "run.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.1.json", "run.json"]


def test_drafts_of_processes_that_run_stay_and_those_of_ended_ones_go(tmp_path: Path) -> None:
    with forked(lambda: None) as ended:
        ended.wait()
    with forked(lambda: time.sleep(60)) as running:
        drafts = {pid: tmp_path / f".a.ckpt.{pid}.tmp" for pid in (ended.pid, running.pid, os.getpid(), 1)}
        for draft in [*drafts.values(), other := tmp_path / f".b.ckpt.{ended.pid}.tmp"]:
            draft.touch()
        (folder := tmp_path / ".a.ckpt.99999999.tmp").mkdir()  # no draft

        replace_durably(tmp_path / "a.ckpt", lambda file: file.write(b"whole"))

    assert (tmp_path / "a.ckpt").read_bytes() == b"whole"
    assert set(tmp_path.glob(".*")) == {drafts[running.pid], drafts[1], other, folder}
