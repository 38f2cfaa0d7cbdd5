"""Callback that watches the hosts and rolls back those that diverge."""

from collections import Counter
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from lightning import Callback, LightningModule, Trainer

from esper_lightning.datamodules import HostPoolData, attached_data
from esper_lightning.envs import HostVerdict
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.runtime.console import print_status

if TYPE_CHECKING:
    from esper_lightning.module import TamiyoModule

MAX_LINES = 5  # most lines in one rollout; further rollbacks are only counted. The run's events.jsonl has all of them


class Governor(Callback):
    """Watches the hosts of a run, rolls back those that diverge, and prints which and why.

    The pools judge by its rules within every environment step, of training and of comparisons. Without it no host is
    judged or restored, no action is vetoed, and no snapshot is taken. The rules are in docs/concepts/governor.md.

    Args:
        rules: When a host counts as diverged, and how the Governor reacts.
    """

    def __init__(self, rules: GovernorConfig = GovernorConfig()) -> None:
        self.rules = rules

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if any(isinstance(other, Governor) and other is not self for other in trainer.callbacks):
            raise ValueError("two Governors in trainer.callbacks; keep one esper_lightning.callbacks.Governor")
        watched_hosts(trainer).set_governor(self.rules)

    def on_train_start(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        self._lines_left = MAX_LINES
        self._diverged: list[HostVerdict] = []  # rollbacks to report
        self._unprinted: Counter[str] = Counter()  # rollbacks of this rollout that were not printed, by kind

    def on_train_batch_end(self, trainer: Trainer, pl_module: "TamiyoModule", *_: object) -> None:
        """Print the rollbacks of this tick; those of several processes at the end of the rollout, by rank 0."""
        ranks = pl_module.collector.ranks
        diverged = [verdict for verdict in pl_module.collector.last_step.verdicts if verdict.decision.diverged]
        self._diverged += [verdict._replace(host=ranks.own[verdict.host]) for verdict in diverged]
        if ranks.world > 1:
            if not trainer.is_last_batch:
                return
            self._diverged = sorted(chain.from_iterable(ranks.gather(self._diverged)), key=attrgetter("tick", "host"))
        for host_verdict in self._diverged:
            if self._lines_left > 0:
                self._lines_left -= 1
                print_status(str(host_verdict))
            else:
                self._unprinted[host_verdict.decision] += 1
        self._diverged = []
        if trainer.is_last_batch:
            if self._unprinted:
                more = " and ".join(f"{count} more hosts {decision}" for decision, count in self._unprinted.items())
                print_status(f"{more} in this rollout: if there are many, lower data.env.training.lr")
            self._lines_left, self._unprinted = MAX_LINES, Counter()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        watched_hosts(trainer).set_governor(None)  # the data module may serve another trainer


def watched_hosts(trainer: Trainer) -> HostPoolData:
    """Return the data module of a trainer. Raises ValueError if its environments are no hosts."""
    data = attached_data(trainer)
    if not isinstance(data, HostPoolData):
        raise ValueError(
            f"the callback Governor watches hosts, and {type(data).__name__} has none; leave the callback out"
        )
    return data
