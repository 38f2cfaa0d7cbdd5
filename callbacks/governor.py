"""Callback that watches the hosts and rolls back those that diverge."""

from collections import Counter
from operator import attrgetter
from typing import Any

from lightning import Callback, LightningModule, Trainer

from esper_lightning.console import print_status
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.envs import Overseer
from esper_lightning.envs.step_result import HostVerdict
from esper_lightning.governor.judge import GovernorConfig
from esper_lightning.module import TamiyoModule

LOGGING_METHODS = ("log", "log_dict")
"""Attributes that Lightning gives to every callback; they lead to the trainer."""


class Governor(Overseer, Callback):
    """Watches the hosts of a run, rolls back those that diverge, and prints which and why.

    The data module asks this callback within every environment step, of training and of comparisons. Without it no host
    is judged or restored, no action is vetoed, and no snapshot is taken. The rules are in docs/concepts/governor.md.

    Args:
        rules: When a host counts as diverged, and how the Governor reacts.
        lines: Most lines to print in one rollout; further rollbacks are only counted. The run's events.jsonl has all
            of them, and TensorBoard their numbers under `governor/`.
    """

    def __init__(self, rules: GovernorConfig = GovernorConfig(), *, lines: int = 5) -> None:
        if lines < 0:
            raise ValueError(f"Governor.lines must not be negative, got {lines}")
        super().__init__(rules)
        self.lines = lines

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with which hosts are watched in other processes, where there is no trainer to log to."""
        return {name: value for name, value in vars(self).items() if name not in LOGGING_METHODS}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to watch the hosts of the trainer's data module.

        Raises ValueError if it has no hosts, or if another Governor watches them.
        """
        data = attached_hosts(trainer)
        if data.overseer not in (None, self):
            raise ValueError("two Governors in trainer.callbacks; keep one esper_lightning.callbacks.Governor")
        data.oversee(self)

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._lines_left = self.lines
        self._diverged: list[HostVerdict] = []  # rollbacks to report
        self._unprinted: Counter[str] = Counter()  # rollbacks of this rollout that were not printed, by kind

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        ranks = pl_module.collector.ranks
        for host_verdict in pl_module.collector.last_step.verdicts:
            if host_verdict.verdict.diverged:
                self._diverged.append(host_verdict._replace(host=ranks.own[host_verdict.host]))
        if ranks.world > 1:  # rank 0 prints those of all at the end of the rollout
            if not trainer.is_last_batch:
                return
            of_all = (verdict for of_rank in ranks.gather(self._diverged) for verdict in of_rank)
            self._diverged = sorted(of_all, key=attrgetter("tick", "host"))
        for host_verdict in self._diverged:
            if self._lines_left > 0:
                self._lines_left -= 1
                print_status(str(host_verdict))
            else:
                self._unprinted[host_verdict.verdict.outcome.value] += 1
        self._diverged = []
        if trainer.is_last_batch:
            if self._unprinted:
                more = " and ".join(f"{count} more hosts {decision}" for decision, count in self._unprinted.items())
                print_status(f"{more} in this rollout: if there are many, lower data.env.training.lr")
            self._lines_left, self._unprinted = self.lines, Counter()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching: the data module may serve another trainer."""
        attached_hosts(trainer).oversee(None)


def attached_hosts(trainer: Trainer) -> HostPoolData:
    """Return the data module of a trainer. Raises ValueError if its environments are no hosts."""
    data = trainer.datamodule
    if not isinstance(data, HostPoolData):
        raise ValueError(
            f"the callback Governor watches hosts, and {type(data).__name__} has none; leave the callback out"
        )
    return data
