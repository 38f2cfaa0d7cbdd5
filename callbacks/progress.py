"""Callback that prints one line for each rollout."""

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from lightning import Callback, Trainer

from esper_lightning.runtime.console import print_status
from esper_lightning.runtime.limits import share_of_training

if TYPE_CHECKING:
    from esper_lightning.module import TamiyoModule


class ProgressLines(Callback):
    """Prints one line for each rollout: means over hosts, speed, and the time that is left."""

    def on_train_start(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        self._start, self._first_tick = time.perf_counter(), pl_module.collector.ticks

    def on_train_epoch_end(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        rollout, collector = trainer.current_epoch + 1, pl_module.collector
        share = share_of_training(trainer, int(trainer.num_training_batches))
        # With `max_steps` Lightning ends the saved epoch again on resume: no rollout of this process is over.
        if not trainer.is_global_zero or not pl_module.metrics:
            return
        means = ", ".join(
            f"{name} {pl_module.metrics[tag]:.3f}"
            for name in ("objective", "score", "return")
            if (tag := f"rollout/{name}") in pl_module.metrics
        )
        speed = (collector.ticks - self._first_tick) / (time.perf_counter() - self._start)  # ticks per second
        left = total = ""
        if share > 0.0:
            last = max(rollout, round(rollout / share))
            left = f", {timedelta(seconds=round((last - rollout) * collector.buffer.ticks / speed))} left"
            total = f" of {last}"
        print_status(f"rollout {rollout}{total}: {means}, {speed * collector.ranks.total:.0f} host epochs/s{left}")
