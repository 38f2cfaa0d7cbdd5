"""Replaced files are whole at any moment, and saved settings are read again."""

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from esper_lightning.ppo.losses import Anneal, PPOConfig
from esper_lightning.runtime.serialization import load_settings, replace_and_keep, replace_durably


class Killed(BaseException):
    """Stands for the end of the process."""


STEPS = {"copied": (shutil, "copy2"), "flushed": (os, "fsync"), "renamed": (Path, "replace")}
"""Functions after which a process may be killed, by what they have done then."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_config_is_whole_whenever_a_process_is_killed_that_replaces_it(
    step: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old" * 1000)
    owner, name = STEPS[step]
    original = getattr(owner, name)

    def killing(*args: Any, **options: Any) -> Any:
        if after:
            original(*args, **options)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, name, killing)
        replace_and_keep(path, "new" * 2000)
    assert path.read_text() in ("old" * 1000, "new" * 2000)

    replace_and_keep(path, "newer")

    assert path.read_text() == "newer"
    earlier = {file.read_text() for file in tmp_path.glob("config.*.yaml")}
    assert "old" * 1000 in earlier and earlier <= {"old" * 1000, "new" * 2000}


def test_the_draft_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.ckpt.99999999.tmp").write_bytes(b"half of a checkpoint")
    (tmp_path / f".a.ckpt.{os.getppid()}.tmp").write_bytes(b"of a process that runs")

    replace_durably(tmp_path / "a.ckpt", lambda file: file.write(b"whole"))

    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt", f".a.ckpt.{os.getppid()}.tmp"}
    assert (tmp_path / "a.ckpt").read_bytes() == b"whole"


def test_settings_of_an_earlier_version_are_read_without_those_that_are_gone() -> None:
    settings = PPOConfig(lr=Anneal(start=0.1, end=0.2), epochs=3)
    saved = asdict(settings)

    assert load_settings(PPOConfig, saved | {"clip": 1, "lr": saved["lr"] | {"clip": 2}}) == settings
    with pytest.raises(ValueError, match=r"the settings PPOConfig do not fit: .*'epoch'"):
        load_settings(PPOConfig, {"epoch": 3})
    with pytest.raises(ValueError, match=r"ppo\.epochs must be at least 1, got 0"):
        load_settings(PPOConfig, {"epochs": 0})
