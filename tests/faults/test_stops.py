"""A run that is stopped or killed at any moment ends with its code; resumed, it equals one that was not stopped."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals
from typing import Any, BinaryIO
from unittest.mock import patch

import pytest
import torch
from lightning import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger

from esper_lightning import default_callbacks, from_config
from esper_lightning.module import TamiyoModule
from esper_lightning.runtime.checkpoint import AtomicCheckpointIO
from tests.faults.runs import GROWING, RunResult, check_that_it_grows, differences_of, grow, result_of, tick_of
from tests.processes import run_in_fork
from tests.runs import HORIZON, Run, only_run, with_callback
from tests.tiers import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")

MID_ROLLOUT = HORIZON + 3
TICKS = (1, 3, HORIZON - 1, HORIZON, HORIZON + 1, MID_ROLLOUT, 2 * HORIZON, 3 * HORIZON - 1)
MOMENTS = ("validation", "save", *TICKS)
"""During the second validation, while a checkpoint of the second rollout is written, and at the ends of these ticks."""


class SignalDuring(Callback):
    """Callback that sends a signal to its own process, once.

    Args:
        moment: `validation` or `save`, each of the second rollout, or the number of a tick.
        number: Signal.
    """

    def __init__(self, moment: str | int, number: int) -> None:
        self.moment, self.number = moment, number

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        ticks = pl_module.collector.ticks
        if ticks == self.moment:
            os.kill(os.getpid(), self.number)
        if self.moment == "save" and ticks == 2 * HORIZON:
            self.saving = patch.object(torch, "save", self._save_half)
            self.saving.start()

    def on_validation_batch_start(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if self.moment == "validation" and trainer.current_epoch == 1:
            os.kill(os.getpid(), self.number)

    def _save_half(self, content: Any, file: BinaryIO, save: Callable[..., None] = torch.save) -> None:
        """Save with a signal when a part of the file is written."""
        self.saving.stop()
        file.write(b"a draft")
        file.flush()
        os.kill(os.getpid(), self.number)
        file.seek(0)
        save(content, file)


def run_by_command(root: Path, *callbacks: tuple[type[Callback], dict[str, Any]], checkpoint: Path | None) -> None:
    added = [flag for callback, settings in callbacks for flag in with_callback(callback, **settings)]
    grow(root, *added, *(["--ckpt_path", str(checkpoint)] if checkpoint else []))


def run_by_script(root: Path, *callbacks: tuple[type[Callback], dict[str, Any]], checkpoint: Path | None) -> None:
    """Train as a program of Python does, with a Trainer of its own."""
    seed_everything(0, verbose=False)
    module, data = from_config(GROWING[1], *GROWING[2:])
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=TensorBoardLogger(root, name="", version=0),
        callbacks=[*default_callbacks(), *(callback(**settings) for callback, settings in callbacks)],
        plugins=[AtomicCheckpointIO()],
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)


DOORS = {"command": run_by_command, "script": run_by_script}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunResult]:
    """Result of a run that is not stopped, by its door."""
    done: dict[str, RunResult] = {}

    def run(door: str) -> RunResult:
        if door not in done:
            root = tmp_path_factory.mktemp(door)
            DOORS[door](root, checkpoint=None)
            done[door] = result_of(only_run(root))
            check_that_it_grows(done[door])
        return done[door]

    return run


@contextmanager
def default_signals() -> Iterator[None]:
    """In a fork of pytest: signals end the process, as in a program."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (SIGTERM, SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stop(door: str, moment: str | int, number: Signals, root: Path) -> Run:
    """Train in another process that gets a signal, and return its run."""

    def train() -> None:
        with default_signals():
            DOORS[door](root, (SignalDuring, {"moment": moment, "number": int(number)}), checkpoint=None)

    code, said = run_in_fork(train)
    assert code == (-number if number == SIGKILL else 128 + number), said
    # Readers of TensorBoard go through a folder's files by the second in their names, then by process.
    time.sleep(1.0 - time.time() % 1.0)
    return only_run(root)


BEFORE_A_SAVE = TICKS[:4]
"""Moments at which nothing is saved yet, so that a killed run begins anew."""

CASES = [
    (door, moment, number)
    for door in DOORS
    for number in (SIGTERM, SIGINT, SIGKILL)
    for moment in MOMENTS
    if number != SIGKILL or moment not in BEFORE_A_SAVE
]
CASES += [("command", MID_ROLLOUT, SIGHUP)]
FAST = [("script", MID_ROLLOUT, SIGTERM), ("command", "save", SIGKILL)]


@pytest.mark.parametrize(("door", "moment", "number"), rest_is_slow(CASES, FAST), ids=str)
def test_a_stopped_run_goes_on_to_the_end_of_one_that_was_not_stopped(
    door: str, moment: str | int, number: Signals, whole: Callable[[str], RunResult], tmp_path: Path
) -> None:
    run = stop(door, moment, number, tmp_path)
    ticks = 2 * HORIZON if moment in ("validation", "save") else int(moment)
    assert tick_of(run.last) == (ticks if number != SIGKILL else (ticks - 1) // HORIZON * HORIZON)

    DOORS[door](tmp_path, checkpoint=run.last)

    assert differences_of(result_of(run), whole(door)) == []


def test_a_second_signal_ends_a_run_at_once_and_leaves_its_last_checkpoint(tmp_path: Path) -> None:
    def train() -> None:
        with default_signals():
            grow(tmp_path, *with_callback(SignalTwice))

    code, said = run_in_fork(train)

    assert code == -SIGTERM, said
    assert tick_of(only_run(tmp_path).last) == HORIZON


class SignalTwice(Callback):
    """Callback that sends SIGTERM to its own process twice, one right after the other."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if pl_module.collector.ticks == MID_ROLLOUT:
            os.kill(os.getpid(), SIGTERM)
            os.kill(os.getpid(), SIGTERM)


@pytest.mark.slow
def test_a_run_stopped_at_every_tick_of_two_rollouts_goes_on_each_time(
    whole: Callable[[str], RunResult], tmp_path: Path
) -> None:
    checkpoint: Path | None = None
    for tick in range(1, 2 * HORIZON + 1):

        def train(tick: int = tick, checkpoint: Path | None = checkpoint) -> None:
            with default_signals():
                run_by_command(tmp_path, (SignalDuring, {"moment": tick, "number": SIGTERM}), checkpoint=checkpoint)

        code, said = run_in_fork(train)
        assert code == 128 + SIGTERM, said
        checkpoint = only_run(tmp_path).last
        assert tick_of(checkpoint) == tick

    grow(tmp_path, "--ckpt_path", str(checkpoint))
    assert differences_of(result_of(only_run(tmp_path)), whole("command")) == []
