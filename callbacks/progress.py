"""Progress: how far a run is, for people who wait."""

import time
from datetime import timedelta
from typing import Literal

from lightning import Callback, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from esper_lightning.data import say
from esper_lightning.module import TamiyoModule

Show = Literal["auto", "bars", "lines", "nothing"]


class ProgressReport(Callback):
    """Bars for the rollout and for the run on a terminal, a line per rollout elsewhere.

    Args:
        show: auto: bars on a terminal, else lines. nothing: quiet. `trainer.enable_progress_bar false` is quiet, too.
        every: Rollouts between lines; the last rollout has one, too.
    """

    def __init__(self, show: Show = "auto", every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"progress.every must be at least 1 rollout, got {every}")
        self.show = show
        self.every = every
        self.bars: Progress | None = None

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._began = time.perf_counter()
        self._since = pl_module.loop.ticks
        self._horizon = pl_module.loop.buffer.ticks
        self._whole = trainer.max_epochs * self._horizon
        console = Console()
        if self.show == "bars" or (self.show == "auto" and console.is_terminal):
            self.bars = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TaskProgressColumn(),
                TimeRemainingColumn(elapsed_when_finished=True), TextColumn("{task.fields[note]}"), console=console,
            )  # fmt: skip
            self._rollout = self.bars.add_task("rollout", total=self._horizon, note="")
            self._run = self.bars.add_task("run", total=self._whole, completed=self._since, note="")
            self.bars.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        loop = pl_module.loop
        rollout = trainer.current_epoch + 1
        if self.bars is not None:
            played = loop.ticks - trainer.current_epoch * self._horizon
            self.bars.update(self._rollout, completed=played, description=f"rollout {rollout} of {trainer.max_epochs}")
            if trainer.is_last_batch:
                self.bars.update(self._run, completed=loop.ticks, note=summary(pl_module))
            else:
                self.bars.update(self._run, completed=loop.ticks)
        elif self.show != "nothing" and trainer.is_last_batch:
            self._say_line(trainer, pl_module)

    def _say_line(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        loop, rollout = pl_module.loop, trainer.current_epoch + 1
        if rollout % self.every == 0 or rollout == trainer.max_epochs:
            pace = (loop.ticks - self._since) / (time.perf_counter() - self._began)
            left = timedelta(seconds=round(max(0, self._whole - loop.ticks) / pace))
            speed = f"{pace * loop.pool.n_envs:.0f} host epochs/s, {left} left"
            say(f"rollout {rollout} of {trainer.max_epochs}: {summary(pl_module)}, {speed}")

    def on_train_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: TamiyoModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        """Gives the terminal back."""
        if self.bars is not None:
            self.bars.stop()
            self.bars = None


def summary(module: TamiyoModule) -> str:
    """`objective 0.541, accuracy 0.712, return 0.230`: of the rollout that is over, means over hosts."""
    found = {name: value.item() for name, value in module.loop.last.shown.items() if name != "reward"}
    found["return"] = module.report.rollout.returns.mean().item()
    return ", ".join(f"{name} {found[name]:.3f}" for name in ("objective", "accuracy", "return") if name in found)
