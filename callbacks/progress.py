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

from esper_lightning.console import print_status
from esper_lightning.module import TamiyoModule

ProgressStyle = Literal["auto", "bars", "lines", "nothing"]


class ProgressBars(Progress):
    """Progress bars of the rollout and of the run, with a line of text below them."""

    def __init__(self, console: Console, *, ticks: int, total_ticks: int, done_ticks: int) -> None:
        self.note = ""
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
        super().__init__(*columns, console=console, expand=True)
        self.rollout = self.add_task("rollout", total=ticks)
        self.run = self.add_task("run", total=total_ticks, completed=done_ticks)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.note, overflow="ellipsis", no_wrap=True)


class ProgressReport(Callback):
    """Shows progress bars of the rollout and of the run on a terminal, or prints one line per rollout elsewhere.

    Args:
        show: auto: bars on a terminal, else lines. nothing: print nothing, like `trainer.enable_progress_bar false`.
        every: Rollouts between lines; the last rollout always has one.
    """

    def __init__(self, show: ProgressStyle = "auto", every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"progress.every must be at least 1 rollout, got {every}")
        self.show = show
        self.every = every
        self.bars: ProgressBars | None = None

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._start_time = time.perf_counter()
        self._first_tick = pl_module.collector.ticks
        self._horizon = pl_module.collector.buffer.ticks
        self._total_ticks = trainer.max_epochs * self._horizon
        console = Console()
        # rich alone would take a pipe for a terminal where FORCE_COLOR is set, as it is on many CI systems.
        is_terminal = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
        if self.show == "bars" or (self.show == "auto" and is_terminal):
            self.bars = ProgressBars(
                console, ticks=self._horizon, total_ticks=self._total_ticks, done_ticks=self._first_tick
            )
            self.bars.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        rollout, last, ticks = trainer.current_epoch + 1, trainer.max_epochs, pl_module.collector.ticks
        if self.bars is not None:
            shown = f"rollout {rollout} of {last}"
            self.bars.update(self.bars.rollout, completed=ticks - (rollout - 1) * self._horizon, description=shown)
            self.bars.update(self.bars.run, completed=ticks, description=f"{self._time_left(ticks)} left")
            if trainer.is_last_batch:
                self.bars.note = f"{shown}: {summary(pl_module)}"
        elif self.show != "nothing" and trainer.is_last_batch and (rollout % self.every == 0 or rollout == last):
            speed = self._ticks_per_second(ticks) * pl_module.collector.ranks.total
            timing = f"{speed:.0f} host epochs/s, {self._time_left(ticks)} left"
            print_status(f"rollout {rollout} of {last}: {summary(pl_module)}, {timing}")

    def _ticks_per_second(self, ticks: int) -> float:
        """Return the mean ticks per second since this process started to train."""
        return (ticks - self._first_tick) / (time.perf_counter() - self._start_time)

    def _time_left(self, ticks: int) -> timedelta:
        """Return the estimated time left: rich's own estimate covers half a minute, and a tick may take longer."""
        return timedelta(seconds=round(max(0, self._total_ticks - ticks) / self._ticks_per_second(ticks)))

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
    names = [name for name in ("objective", "accuracy", "return") if name in module.means]
    return ", ".join(f"{name} {float(module.means[name]):.3f}" for name in names)
