"""Callback that prints the rollbacks of the Governor."""

from collections import Counter

from lightning import Callback, Trainer

from esper_lightning.console import print_status
from esper_lightning.module import TamiyoModule


class Governor(Callback):
    """Prints which hosts the Governor rolled back, and why.

    The Governor itself is a part of every environment (`data.env.governor`) and acts within the environment step: so a
    rollback takes effect before the policy's update, and applies to the controllers of a comparison, too.

    Args:
        lines: Most lines to print in one rollout; further rollbacks are only counted. The run's events.jsonl has all
            of them, and TensorBoard their numbers under `governor/`.
    """

    def __init__(self, lines: int = 5) -> None:
        if lines < 0:
            raise ValueError(f"governor.lines must not be negative, got {lines}")
        self.lines = lines

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._lines_left = self.lines
        self._unprinted: Counter[str] = Counter()  # rollbacks of this rollout that were not printed, by kind

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        loop = pl_module.collector
        if not loop.pool.config.governor.enabled:
            return
        for host_verdict in loop.last_step.verdicts:
            if not host_verdict.verdict.diverged:
                continue
            if self._lines_left > 0:
                self._lines_left -= 1
                print_status(str(host_verdict))
            else:
                self._unprinted[host_verdict.verdict.outcome.value] += 1
        if trainer.is_last_batch:
            if self._unprinted:
                more = " and ".join(f"{count} more hosts {decision}" for decision, count in self._unprinted.items())
                print_status(f"{more} in this rollout: if there are many, lower data.env.training.lr")
            self._lines_left, self._unprinted = self.lines, Counter()
