"""Measure the cost of telemetry in one run whose telemetry level changes from rollout to rollout.

    python -m benchmarks.telemetry --rounds 10

Hosts are base-8 CNNs (6,418 parameters) on 32×32 inputs with eight minibatches of 32 per tick. This tick is short, so
telemetry takes a larger share of it than with a real data set. A round is one rollout at each level. The cost is the
additional time of a rollout over one at `off`. The time in telemetry's own hooks is reported as well, because on a busy
machine the difference of two rollouts is mostly noise.
"""

import argparse
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from lightning import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich import box
from rich.table import Table

from benchmarks.hosts import CASES, training_settings
from esper_lightning.callbacks import Governor, RolloutState, Telemetry
from esper_lightning.console import wide_console
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.envs import ActionConfig, EnvConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.losses import PPOConfig
from esper_lightning.telemetry.level import Level

LEVELS: tuple[Level, ...] = ("off", "normal", "debug")
"""Telemetry levels in the order of rollouts. With three levels, figures (every tenth rollout) fall on each equally."""

WARM_UP_ROUNDS = 1
"""Number of initial rounds that are left out, because first calls take longer."""

MAX_COST = {"normal": 0.03, "debug": 0.15}
"""Largest accepted cost of each level, as a share of the time without telemetry."""


class AlternatingTelemetry(Telemetry):
    """Telemetry that changes its level after every rollout and measures the time.

    Attributes:
        seconds: Durations of rollouts, by level.
        hook_seconds: Seconds in telemetry's own hooks per rollout, by level.
    """

    def __init__(self) -> None:
        # A short run has anomalies; with raised_ticks=0 they do not change the level.
        super().__init__(raised_ticks=0)
        self.seconds: dict[Level, list[float]] = {level: [] for level in LEVELS}
        self.hook_seconds: dict[Level, list[float]] = {level: [] for level in LEVELS}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self.detail.level = LEVELS[trainer.current_epoch % len(LEVELS)]
        self.hook_seconds[self.detail.level].append(0.0)
        self._began = time.perf_counter()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TamiyoModule, *args: object) -> None:
        began = time.perf_counter()
        super().on_before_optimizer_step(trainer, pl_module, *args)
        self.hook_seconds[self.detail.level][-1] += time.perf_counter() - began

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *args: object) -> None:
        began = time.perf_counter()
        super().on_train_batch_end(trainer, pl_module, *args)
        self.hook_seconds[self.detail.level][-1] += time.perf_counter() - began

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self.seconds[self.detail.level].append(time.perf_counter() - self._began)


def measure(hosts: int, executor: str, rounds: int, folder: Path) -> AlternatingTelemetry:
    """Run all rounds and return the telemetry callback with the measured times."""
    case = CASES["32x8"]
    env = EnvConfig(
        executor=executor,
        training=training_settings(case, "fp32"),
        lifecycle=LifecycleConfig(training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0),
        actions=ActionConfig(tempos={"FAST": 2}),
    )
    telemetry = AlternatingTelemetry()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=len(LEVELS) * (rounds + WARM_UP_ROUNDS),
        callbacks=[RolloutState(), Governor(), telemetry],
        logger=TensorBoardLogger(folder, name=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(TamiyoModule(ppo=PPOConfig(minibatches=2)), HostPoolData(case.task, case.host, env, n_envs=hosts))
    return telemetry


def main() -> None:
    """Print the cost of each level."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8, help="number N of hosts")
    parser.add_argument("--executor", default="threads", help="executor that trains the hosts")
    parser.add_argument("--rounds", type=int, default=10, help="rollouts of each level that count")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        run = measure(args.hosts, args.executor, args.rounds, Path(folder))
    table = Table("level", "seconds a rollout", "cost", "quartiles by round", "in its hooks", "bar", box=box.MARKDOWN)
    off = np.array(run.seconds["off"][WARM_UP_ROUNDS:])
    for level in LEVELS:
        taken = np.array(run.seconds[level][WARM_UP_ROUNDS:])
        low, high = np.quantile(taken / off - 1.0, (0.25, 0.75))
        own = np.mean(run.hook_seconds[level][WARM_UP_ROUNDS:]) / off.mean()
        cost, bar = taken.mean() / off.mean() - 1.0, f"{MAX_COST[level]:.0%}" if level in MAX_COST else ""
        table.add_row(level, f"{taken.mean():.2f}", f"{cost:+.1%}", f"{low:+.1%} … {high:+.1%}", f"{own:.1%}", bar)
    wide_console().print(table)  # Markdown rows must not be wrapped


if __name__ == "__main__":
    main()
