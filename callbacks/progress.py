"""Callback that shows the progress of a run."""

import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

from lightning import Callback, Trainer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from esper_lightning.data import say
from esper_lightning.module import TamiyoModule

Show = Literal["auto", "bars", "lines", "nothing"]


class Bars(Progress):
    """Progress bars of the rollout and of the run, with a line of text below them."""

    def __init__(self, console: Console, ticks: int, whole: int, done: int) -> None:
        self.note = ""
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
        super().__init__(*columns, console=console, expand=True)
        self.rollout = self.add_task("rollout", total=ticks)
        self.run = self.add_task("run", total=whole, completed=done)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.note, overflow="ellipsis", no_wrap=True)


class ProgressReport(Callback):
    """Shows progress bars of the rollout and of the run on a terminal, or prints one line per rollout elsewhere.

    Args:
        show: auto: bars on a terminal, else lines. nothing: print nothing, like `trainer.enable_progress_bar false`.
        every: Rollouts between lines; the last rollout always has one.
    """

    def __init__(self, show: Show = "auto", every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"progress.every must be at least 1 rollout, got {every}")
        self.show = show
        self.every = every
        self.bars: Bars | None = None

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._began = time.perf_counter()
        self._since = pl_module.loop.ticks
        self._horizon = pl_module.loop.buffer.ticks
        self._whole = trainer.max_epochs * self._horizon
        console = Console()
        # rich alone would take a pipe for a terminal where FORCE_COLOR is set, as it is on many CI systems.
        able = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
        if self.show == "bars" or (self.show == "auto" and able):
            self.bars = Bars(console, self._horizon, self._whole, self._since)
            self.bars.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        rollout, last, ticks = trainer.current_epoch + 1, trainer.max_epochs, pl_module.loop.ticks
        if self.bars is not None:
            shown = f"rollout {rollout} of {last}"
            self.bars.update(self.bars.rollout, completed=ticks - (rollout - 1) * self._horizon, description=shown)
            self.bars.update(self.bars.run, completed=ticks, description=f"{self._left(ticks)} left")
            if trainer.is_last_batch:
                self.bars.note = f"{shown}: {summary(pl_module)}"
        elif self.show != "nothing" and trainer.is_last_batch and (rollout % self.every == 0 or rollout == last):
            speed = f"{self._pace(ticks) * pl_module.loop.pool.n_envs:.0f} host epochs/s, {self._left(ticks)} left"
            say(f"rollout {rollout} of {last}: {summary(pl_module)}, {speed}")

    def _pace(self, ticks: int) -> float:
        """Return the mean ticks per second since this process started to train."""
        return (ticks - self._since) / (time.perf_counter() - self._began)

    def _left(self, ticks: int) -> timedelta:
        """Return the estimated time left: rich's own estimate covers half a minute, and a tick may take longer."""
        return timedelta(seconds=round(max(0, self._whole - ticks) / self._pace(ticks)))

    def on_train_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: TamiyoModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        """Remove the bars from the terminal."""
        if self.bars is not None:
            self.bars.stop()
            self.bars = None


def summary(module: TamiyoModule) -> str:
    """Return the last rollout's means over hosts: `objective 0.541, accuracy 0.712, return 0.230`."""
    found = {name: value.item() for name, value in module.loop.last.shown.items() if name != "reward"}
    found["return"] = module.report.rollout.returns.mean().item()
    return ", ".join(f"{name} {found[name]:.3f}" for name in ("objective", "accuracy", "return") if name in found)
