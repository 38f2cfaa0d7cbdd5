"""Callback that prints one line for each rollout."""

import time
from datetime import timedelta

from lightning import Callback, Trainer

from esper_lightning.console import print_status
from esper_lightning.module import TamiyoModule


class ProgressLines(Callback):
    """Prints one line for each rollout: means over hosts, speed, and the time that is left."""

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._start, self._first_tick = time.perf_counter(), pl_module.collector.ticks

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        rollout, last, collector = trainer.current_epoch + 1, trainer.max_epochs, pl_module.collector
        if not trainer.is_global_zero:
            return
        means = ", ".join(
            f"{name} {pl_module.metrics[tag]:.3f}"
            for name in ("objective", "score", "return")
            if (tag := f"rollout/{name}") in pl_module.metrics
        )
        speed = (collector.ticks - self._first_tick) / (time.perf_counter() - self._start)  # ticks per second
        left = ""
        if last is not None and last > 0:
            left = f", {timedelta(seconds=round((last - rollout) * collector.buffer.ticks / speed))} left"
        total = f" of {last}" if left else ""
        print_status(f"rollout {rollout}{total}: {means}, {speed * collector.ranks.total:.0f} host epochs/s{left}")
