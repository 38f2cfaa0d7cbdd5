"""Files, saved settings, the clock of phases, the record of a run, and output on the terminal."""

import json
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.ppo.losses import Anneal, PPOConfig
from esper_lightning.runtime.checkpoint import AtomicCheckpointIO, differences
from esper_lightning.runtime.console import NOISY_LOGGERS, print_status, quieter_lightning, wide_console
from esper_lightning.runtime.machine import PHASES, PhaseClock, git_revision
from esper_lightning.runtime.serialization import load_settings, replace_and_keep, replace_file
from tests.envs.executors.fake_cuda import Event, FakeCuda, Stream
from tests.runs import fit, load, only_run

# Files


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

    replace_file(tmp_path / "a.ckpt", lambda draft: draft.write_bytes(b"whole"))

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


def test_a_write_that_fails_half_way_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weights": torch.ones(3)}, target)
    assert torch.equal(load(target)["weights"], torch.ones(3))
    before = target.read_bytes()

    def full_disk(checkpoint: object, file: BinaryIO) -> None:
        file.write(b"half of a checkpoint")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(3)}, target)

    assert target.read_bytes() == before
    assert list(target.parent.iterdir()) == [target]


# Time by phase

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def nonzero_seconds(clock: PhaseClock) -> dict[str, float]:
    """Return the seconds of all phases that took any time."""
    return {phase: seconds for phase, seconds in clock.take_seconds().items() if seconds}


def test_time_is_of_the_phase_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock, profiler = PhaseClock(CPU), SimpleProfiler()
    clock.profile = profiler.profile
    for seconds, phase in ((2.0, "policy"), (4.0, "update"), (1.0, "policy")):
        with clock.measure(phase):
            now += seconds

    assert nonzero_seconds(clock) == {"policy": 3.0, "update": 4.0}
    assert clock.take_seconds() == dict.fromkeys(PHASES, 0.0)
    assert list(profiler.recorded_durations) == ["policy", "update"], "Lightning's profiler has a row for each phase"


def test_on_a_gpu_events_in_the_stream_at_hand_count(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """S13: time is measured by events on CUDA, without waiting, and by the processor's clock on the CPU."""
    events: list[Event] = []
    arrived = 2  # events that the GPU has reached

    def note(event: Event, stream: Stream) -> None:
        event.stream = stream
        events.append(event)

    monkeypatch.setattr(Event, "record", note)
    monkeypatch.setattr(Event, "elapsed_time", lambda begin, end: 1500.0)  # milliseconds
    monkeypatch.setattr(Event, "query", lambda event: events.index(event) < arrived)
    clock = PhaseClock(GPU)
    with clock.measure("policy"):
        pass
    with torch.cuda.stream(own := Stream(GPU)), clock.measure("train"):
        pass

    assert [event.stream for event in events] == [fake_cuda.default[GPU]] * 2 + [own] * 2
    assert all(event.enable_timing for event in events)
    assert nonzero_seconds(clock) == {"policy": 1.5}
    assert nonzero_seconds(clock) == {}
    arrived = 4
    assert nonzero_seconds(clock) == {"train": 1.5}
    assert (clock.name, PhaseClock(CPU).name) == ("cuda_events", "perf_counter")


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_a_tick_s_phases_add_up_to_the_tick(make_pool: Callable[..., HostPool], executor: str) -> None:
    pool, wanderer = make_pool(4, executor=executor), RandomValid(0)
    for _ in range(pool.config.horizon):
        pool.clock.take_seconds()
        action = wanderer.act(pool)
        begin = time.perf_counter()
        pool.step(action)
        whole = time.perf_counter() - begin
        seconds = pool.clock.take_seconds()

        assert 0.5 * whole < sum(seconds.values()) <= whole
        assert all(seconds[phase] > 0.0 for phase in ("train", "validate", "bookkeeping"))


# The record of a run


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


def git(folder: Path, *command: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, *command], cwd=folder, check=True, capture_output=True)


def test_the_revision_is_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision(file) is None  # no program of this name


def test_differences_are_a_line_each() -> None:
    before = {"data": {"a": 1, "b": {"c": [1]}, "gone": 3}}
    now = {"data": {"a": 2, "b": {"c": [1]}, "new": True}}

    assert differences(before, now) == [
        "data.a: 1 before, 2 now",
        "data.new: nothing before, True now",
        "data.gone: 3 before, nothing now",
    ]


# The terminal


def test_a_text_of_others_is_printed_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_status("plain [old] x [/x] :warning:")
    wide_console().print("plain [old] x [/x] :warning:")
    assert capsys.readouterr().out == 2 * "plain [old] x [/x] :warning:\n"


def test_advertisements_are_dropped_within_the_block_and_other_messages_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def say(*messages: str) -> None:
        for message in messages:
            logging.getLogger(NOISY_LOGGERS[0]).warning(message)

    before = {name: list(logging.getLogger(name).filters) for name in NOISY_LOGGERS}
    with caplog.at_level(logging.WARNING, logger=NOISY_LOGGERS[0]):
        logging.getLogger(NOISY_LOGGERS[0]).addHandler(caplog.handler)
        with quieter_lightning():
            say("Tip: buy this", "val_acc did not improve")
        say("Tip: buy that")
        logging.getLogger(NOISY_LOGGERS[0]).removeHandler(caplog.handler)

    assert {record.getMessage() for record in caplog.records} == {"val_acc did not improve", "Tip: buy that"}
    assert {name: logging.getLogger(name).filters for name in NOISY_LOGGERS} == before
