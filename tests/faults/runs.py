"""A tiny run in which hosts grow, and the results of such a run."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, Trainer

from esper_lightning.module import TamiyoModule
from esper_lightning.telemetry.events import EVENTS_FILE, Started, read_events
from tests.runs import TINY, Run, cli, continuation, differences, load, measured, with_callback

GROWING = (*TINY, "--data.n_envs", "3", "--data.env.actions.tempos={FAST: 1}")
"""Settings with three hosts and quick seeds, so that some seeds are fossilized whatever the RNG seed."""

Callbacks = Mapping[type[Callback], dict[str, Any]]
"""Classes of callbacks with their arguments."""


class RunResult(NamedTuple):
    """Return the results of a finished run, without times and memory."""

    last: dict[str, Any]
    best: dict[str, Any]
    points: dict[str, list[tuple[int, float]]]
    events: list[str]
    """Events except starts, whose number depends on interruptions."""
    files: list[str]


def grow(root: Path, *flags: str) -> None:
    """Run the tiny training in this process, with its folder below `root`."""
    cli(*GROWING, "--trainer.default_root_dir", str(root), *flags)


def result_of(run: Run) -> RunResult:
    return RunResult(
        last=continuation(run.last),
        best=continuation(run.checkpoints / "best.ckpt"),
        points=measured(run),
        events=[str(event) for event in read_events(run.folder / EVENTS_FILE) if not isinstance(event, Started)],
        files=sorted(path.name for path in run.checkpoints.iterdir() if not path.name.startswith("tick")),
    )


def differences_of(ending: RunResult, reference: RunResult) -> list[str]:
    """Return the paths at which two results differ, bit for bit."""
    return differences(ending._asdict(), reference._asdict())


def check_that_it_grows(ending: RunResult) -> None:
    """Raise ValueError if no seed was fossilized: such a run tests nothing."""
    kept = [value for _, value in ending.points["rollout/parameters"]]
    if len(set(kept)) < 2:
        raise ValueError(f"nothing grew in the run, so it is no test: parameters after each rollout: {kept}")


def tick_of(checkpoint: Path) -> int:
    """Return the number of ticks that a run had done when it was saved."""
    return load(checkpoint)["callbacks"]["RolloutState"]["loop"]["ticks"]


def with_callbacks(callbacks: Callbacks) -> list[str]:
    """Return flags that add callbacks to a run."""
    return [flag for callback, init_args in callbacks.items() for flag in with_callback(callback, **init_args)]


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
