"""A run that is stopped, killed or resumed at any moment ends as one that was not, bit for bit."""

import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals
from typing import Any, BinaryIO, NamedTuple
from unittest.mock import patch

import pytest
import torch
import yaml
from lightning import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger

from esper_lightning import default_callbacks, from_config
from esper_lightning.__main__ import main
from esper_lightning.envs.snapshot import unpack
from esper_lightning.module import TamiyoModule
from esper_lightning.runtime.checkpoint import AtomicCheckpointIO
from esper_lightning.telemetry.events import EVENTS_FILE, Started, read_events
from tests.processes import run_in_fork
from tests.runs import (
    EPOCHS,
    HORIZON,
    TINY,
    Run,
    SaveEveryTick,
    cli,
    continuation,
    differences,
    load,
    make_trainer,
    measured,
    only_run,
    saved_stages,
    tick_of,
    with_callback,
)
from tests.tiers import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory")

GROWING = (*TINY, "--data.n_envs", "3", "--data.env.actions.tempos={FAST: 1}")
"""Settings with three hosts and quick seeds, so that some seeds are fossilized whatever the RNG seed."""

OPTIONS = (
    *("--data.env.lifecycle.birth=random", "--data.env.training.micro_batches=2", "--seed_everything=1"),
    *("--model.ppo.normalize_rewards=true", "--model.ppo.value_clip=0.5"),
)
"""Every head of the policy, hosts that train on parts of a batch, and the options of PPO that are off by default."""

# Adam moves a weight by up to its learning rate where the gradient is only rounding error; sgd hardly moves it.
SGD = ("--data.env.training.optimizer=sgd",)

MID_ROLLOUT, END = HORIZON + 3, EPOCHS * HORIZON

TOLERANCE = 1e-5
"""Tolerance in float32 after three ticks, for weights, losses and scores; measured: 2e-6."""


class SpoilTwoHosts(Callback):
    """Spoil hosts before tick `tick` + 1: the first one's weights become NaN, the second one's far too large.

    The first is rolled back in that tick; the second is suspicious in it and in the next, and rolled back in the third.
    """

    def __init__(self, tick: int) -> None:
        self.tick = tick

    def on_train_batch_start(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if pl_module.collector.ticks == self.tick:
            for env, factor in zip(pl_module.collector.pool.envs, (math.nan, 1e5), strict=False):
                with torch.no_grad():
                    env.network.head.weight.mul_(factor)


class Kind(NamedTuple):
    executor: str = "loop"
    precision: str = "fp32"
    threads: int = 1  # per operator of torch
    spoiled: bool = False  # hosts are rolled back
    flags: tuple[str, ...] = ()

    def train(self, root: Path, *flags: str) -> None:
        """Train in this process, with the run's folder below `root`."""
        cli(
            *GROWING,
            *("--trainer.default_root_dir", str(root), "--data.env.executor", self.executor),
            *("--data.env.training.precision", self.precision, "--threads_per_operator", str(self.threads)),
            *(with_callback(SpoilTwoHosts, tick=HORIZON + 1) if self.spoiled else ()),
            *self.flags,
            *flags,
        )

    def resume(self, checkpoint: Path, root: Path, *flags: str) -> Run:
        """Resume from a copy of a checkpoint, in a folder with nothing else."""
        run = Run(root / "version_0")
        run.checkpoints.mkdir(parents=True)
        self.train(root, "--ckpt_path", shutil.copy(checkpoint, run.checkpoints), *flags)
        return run


LOOP = Kind()

Whole = Callable[[Kind], Run]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """`whole(kind)` returns a run that was not stopped, with a checkpoint of every tick."""
    done: dict[Kind, Run] = {}

    def run(kind: Kind) -> Run:
        if kind not in done:
            root = tmp_path_factory.mktemp("whole")
            kind.train(root, *with_callback(SaveEveryTick))
            done[kind] = only_run(root)
            points = measured(done[kind])
            if not kind.flags:
                assert len({value for _, value in points["rollout/parameters"]}) > 1, "nothing grew, so it is no test"
            if kind.spoiled:
                rollbacks, suspicious = (dict(points[f"governor/{name}"]) for name in ("rollbacks", "suspicious"))
                counts = rollbacks[MID_ROLLOUT], suspicious[MID_ROLLOUT], rollbacks[MID_ROLLOUT + 1]
                assert counts == (1, 1, 2), "one host was rolled back before the checkpoint, another is about to be"
        return done[kind]

    return run


def at(run: Run, tick: int) -> Path:
    return run.checkpoints / f"tick{tick}.ckpt"


def content_of(run: Run) -> dict[str, Any]:
    """Return what a finished run has left, without times, memory, starts and the checkpoints of ticks."""
    events = read_events(run.folder / EVENTS_FILE)
    return {
        "last": continuation(run.last),
        "best": continuation(run.checkpoints / "best.ckpt"),
        "points": measured(run),
        "events": [str(event) for event in events if not isinstance(event, Started)],
        "files": sorted(path.name for path in run.checkpoints.iterdir() if not path.name.startswith("tick")),
    }


# Resumed from a checkpoint

EXECUTORS = ("loop", "threads", "fused")
SPOILED = [(Kind(executor, spoiled=True), MID_ROLLOUT) for executor in EXECUTORS]
CASES: list[tuple[Kind, int]] = [
    *((LOOP, tick) for tick in (1, HORIZON - 1, HORIZON, HORIZON + 1, MID_ROLLOUT, 2 * HORIZON, END - 1)),
    *((Kind(executor), tick) for executor in EXECUTORS[1:] for tick in (MID_ROLLOUT, 2 * HORIZON + 2)),
    *((Kind(executor, "bf16"), MID_ROLLOUT) for executor in EXECUTORS),
    *SPOILED,
    (Kind(flags=OPTIONS), MID_ROLLOUT),
]
FAST = [(LOOP, 2 * HORIZON), SPOILED[-1]]


@pytest.mark.parametrize(("kind", "tick"), rest_is_slow(CASES, FAST), ids=str)
def test_a_run_resumed_at_any_tick_equals_the_uninterrupted_one(
    kind: Kind, tick: int, whole: Whole, tmp_path: Path
) -> None:
    """F6: hidden state, rollout in flight and random states are in the checkpoint."""
    reference = whole(kind)
    if tick % HORIZON > 2:
        assert saved_stages(at(reference, tick)) & {"TRAINING", "BLENDING", "PROBATIONARY"}, "nothing grows there"
    if kind.flags:
        count = load(at(reference, tick))["state_dict"]["reward_norm.count"]
        assert count == 3 * HORIZON, "one rollout of three hosts"

    run = kind.resume(at(reference, tick), tmp_path)

    assert differences(continuation(run.last), continuation(reference.last)) == []
    later = {tag: [point for point in points if point[0] > tick] for tag, points in measured(reference).items()}
    assert measured(run) == {tag: points for tag, points in later.items() if points}


@pytest.mark.slow
def test_saving_in_mid_rollout_leaves_no_trace_in_the_run(whole: Whole, tmp_path: Path) -> None:
    LOOP.train(tmp_path)

    assert differences(content_of(only_run(tmp_path)), content_of(whole(LOOP))) == []


@pytest.mark.slow
def test_a_run_that_goes_back_in_its_folder_ends_as_it_did_and_doubles_no_point(whole: Whole, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(whole(LOOP).folder, tmp_path / "version_0")))  # all its ticks are in TensorBoard
    run.last.unlink()

    LOOP.train(tmp_path, "--ckpt_path", str(at(run, MID_ROLLOUT)))

    assert only_run(tmp_path).folder == run.folder
    assert measured(run) == measured(whole(LOOP))
    events = list(read_events(run.folder / EVENTS_FILE))
    assert [event.tick for event in events if isinstance(event, Started)] == [0, MID_ROLLOUT]
    ticks = [event.tick for event in events]
    assert ticks == sorted(ticks)
    assert differences(continuation(run.last), continuation(whole(LOOP).last)) == []


def test_a_run_goes_on_in_its_folder_with_its_own_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LOOP.train(tmp_path, "--trainer.max_epochs=1")
    run = only_run(tmp_path)
    capsys.readouterr()

    changed = ("--model.ppo.lr.start=0.01", "--data.env.training.lr=0.5", "--data.env.executor=fused")
    LOOP.train(tmp_path, "--trainer.max_epochs=2", "--ckpt_path=last", *changed)

    assert only_run(tmp_path).folder == run.folder
    assert [line for line in capsys.readouterr().out.splitlines() if " before, " in line] == [
        "data.env.executor: loop before, fused now",
        "data.env.training.lr: 0.02 before, 0.5 now",
        "model.ppo.lr.start: 0.001 before, 0.01 now",
    ]
    assert load(run.last)["hyper_parameters"]["ppo"]["lr"]["start"] == 0.01, "this command's, not the checkpoint's"
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["trainer"]["max_epochs"] == 2


@pytest.mark.slow
def test_a_comparison_says_which_settings_of_the_hosts_are_not_those_of_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LOOP.train(tmp_path, "--trainer.max_epochs=1")
    capsys.readouterr()
    changed = ("--data.env.objective.price=0.3", "--model.evaluation.hosts=2", "--model.evaluation.controls=false")
    config = str(only_run(tmp_path).folder / "config.yaml")
    main(["test", "--config", config, "--ckpt_path", str(only_run(tmp_path).last), *changed])

    lines = [line for line in capsys.readouterr().out.splitlines() if " before, " in line]
    assert lines == ["data.env.objective.price: 0.05 before, 0.3 now"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "tick"),
    [
        (Kind("loop", flags=SGD), Kind("threads", flags=SGD), HORIZON - 1),
        (Kind("loop", flags=SGD), Kind("fused", flags=SGD), HORIZON - 3),
        (Kind("fused", flags=SGD), Kind("loop", flags=SGD), HORIZON - 3),
        # One tick: on a busy machine the threads of one operator wait for each other at every operation.
        (Kind("loop", flags=SGD), Kind("loop", threads=2, flags=SGD), HORIZON - 1),
    ],
    ids=str,
)
def test_other_ways_to_execute_hosts_go_on_within_rounding(
    before: Kind, after: Kind, tick: int, whole: Whole, tmp_path: Path
) -> None:
    reference = whole(before)

    save = with_callback(SaveEveryTick)
    run = after.resume(at(reference, tick), tmp_path, "--trainer.max_epochs=1", "--model.ppo.epochs=1", *save)

    for later in range(tick + 1, HORIZON + 1):
        ended, expected = (hosts(at(each, later)) for each in (run, reference))
        torch.testing.assert_close(ended, expected, rtol=0.0, atol=TOLERANCE)


def hosts(checkpoint: Path) -> list[list[Any]]:
    """Return the state of every host: seeds, weights, losses and objective."""
    envs = [unpack(env) for env in load(checkpoint)["HostPoolData"]["pool"]["envs"]]
    return [[env["growing"]["network"], env["history"], env["objective"]] for env in envs]


@pytest.mark.filterwarnings("ignore:the checkpoint has the random states")
@pytest.mark.parametrize("tick", rest_is_slow([1, HORIZON, HORIZON + 1, END], {HORIZON + 1}))
def test_on_another_type_of_device_a_run_goes_on_from_the_beginning_of_its_rollout(
    tick: int, whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = load(at(whole(LOOP), tick))
    saved["callbacks"]["RolloutState"]["loop"]["generator"] = torch.zeros(16, dtype=torch.uint8)  # as on CUDA
    torch.save(saved, tmp_path / "gpu.ckpt")

    run = LOOP.resume(tmp_path / "gpu.ckpt", tmp_path / "runs")

    assert "this run is on cpu, the run so far was on another type of device" in capsys.readouterr().out
    first = tick // HORIZON
    points = measured(run)
    assert [step for step, _ in points.get("hosts/score", [])] == list(range(first * HORIZON + 1, END + 1))
    assert [step for step, _ in points.get("train/kl", [])] == [HORIZON * (i + 1) for i in range(first, EPOCHS)]


# Stopped by a signal

MOMENTS = ("validation", "save", 1, 3, HORIZON - 1, HORIZON, HORIZON + 1, MID_ROLLOUT, 2 * HORIZON, END - 1)
"""During the second validation, while a checkpoint of the second rollout is written, and at the ends of these ticks."""


class SignalDuring(Callback):
    """Callback that sends a signal to its own process, `times` times, one right after the other.

    `moment`: `validation` or `save`, each of the second rollout, or the number of a tick.
    """

    def __init__(self, moment: str | int, number: int, times: int = 1) -> None:
        self.moment, self.number, self.times = moment, number, times

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        ticks = pl_module.collector.ticks
        for _ in range(self.times if ticks == self.moment else 0):
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


def run_by_command(root: Path, checkpoint: Path | None = None, **signals: Any) -> None:
    stop = with_callback(SignalDuring, **signals) if signals else ()
    LOOP.train(root, *stop, *(["--ckpt_path", str(checkpoint)] if checkpoint else []))


def run_by_script(root: Path, checkpoint: Path | None = None, **signals: Any) -> None:
    """Train as a program of Python does, with a Trainer of its own."""
    seed_everything(0, verbose=False)
    module, data = from_config(GROWING[1], *GROWING[2:])
    callbacks = [*default_callbacks(), *([SignalDuring(**signals)] if signals else [])]
    logger = TensorBoardLogger(root, name="", version=0)
    trainer = make_trainer(root, *callbacks, max_epochs=EPOCHS, logger=logger, plugins=[AtomicCheckpointIO()])
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)


DOORS = {"command": run_by_command, "script": run_by_script}


@pytest.fixture(scope="module")
def ending(whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`ending(door)` returns the content of a run that is not stopped."""
    done: dict[str, dict[str, Any]] = {}

    def content(door: str) -> dict[str, Any]:
        if door == "script" and door not in done:
            root = tmp_path_factory.mktemp(door)
            run_by_script(root)
            done[door] = content_of(only_run(root))
        return done[door] if door == "script" else content_of(whole(LOOP))

    return content


def train_in_fork(door: str, root: Path, checkpoint: Path | None = None, **signals: Any) -> int:
    """Train in another process that gets a signal; return its exit code."""

    def train() -> None:
        before = {number: signal.signal(number, signal.SIG_DFL) for number in (SIGTERM, SIGHUP)}  # as in a program
        DOORS[door](root, checkpoint, **signals)
        for number, handler in before.items():
            signal.signal(number, handler)

    code, said = run_in_fork(train)
    assert code != 0, said
    # Readers of TensorBoard go through a folder's files by the second in their names, then by process.
    time.sleep(1.0 - time.time() % 1.0)
    return code


STOPS = [
    (door, moment, number)
    for door in DOORS
    for number in (SIGTERM, SIGINT, SIGKILL)
    for moment in MOMENTS
    if number != SIGKILL or moment not in (1, 3, HORIZON - 1, HORIZON)  # nothing is saved yet: it begins anew
]
STOPS += [("command", MID_ROLLOUT, SIGHUP)]


@pytest.mark.parametrize(
    ("door", "moment", "number"),
    rest_is_slow(STOPS, [("command", "save", SIGKILL)]),
    ids=str,
)
def test_a_stopped_run_goes_on_to_the_end_of_one_that_was_not_stopped(
    door: str, moment: str | int, number: Signals, ending: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    code = train_in_fork(door, tmp_path, moment=moment, number=int(number))

    run = only_run(tmp_path)
    assert code == (-number if number == SIGKILL else 128 + number)
    ticks = 2 * HORIZON if moment in ("validation", "save") else int(moment)
    assert tick_of(run.last) == (ticks if number != SIGKILL else (ticks - 1) // HORIZON * HORIZON)
    DOORS[door](tmp_path, run.last)
    assert differences(content_of(run), ending(door)) == []


def test_a_second_signal_ends_a_run_at_once_and_leaves_its_last_checkpoint(tmp_path: Path) -> None:
    assert train_in_fork("command", tmp_path, moment=MID_ROLLOUT, number=int(SIGTERM), times=2) == -SIGTERM
    assert tick_of(only_run(tmp_path).last) == HORIZON
