"""Measure the cost of telemetry in one run in which every other rollout has none.

    python -m benchmarks.telemetry --rounds 10

Hosts are base-8 CNNs (6,418 parameters) on 32×32 inputs with eight minibatches of 32 per tick. This tick is short, so
telemetry takes a larger share of it than with a real data set. The cost is the additional time of a rollout over one
without telemetry. The time in telemetry's own code is reported as well, because on a busy machine the difference of
two rollouts is mostly noise.
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

from benchmarks.hosts import CASES, training_settings
from esper_lightning.callbacks import Governor, RolloutState, Telemetry
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.envs import ActionConfig, EnvConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.losses import PPOConfig

WARM_UP_ROUNDS = 1
"""Number of initial rounds that are left out, because first calls take longer."""


class AlternatingTelemetry(Telemetry):
    """Telemetry that is silent in every other rollout and measures the time; figures fall on the others.

    Attributes:
        seconds: Duration of each rollout, first those without telemetry.
        own_seconds: Seconds in telemetry's own code in each rollout with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: tuple[list[float], list[float]] = ([], [])
        self.own_seconds: list[float] = []
        self.is_on = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self.is_on = trainer.current_epoch % 2 == 1
        if self.is_on:
            self.own_seconds.append(0.0)
        self._began = time.perf_counter()

    def _observe(self) -> None:
        if self.is_on:
            began = time.perf_counter()
            super()._observe()
            self.own_seconds[-1] += time.perf_counter() - began

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *args: object) -> None:
        if self.is_on:
            began = time.perf_counter()
            super().on_train_batch_end(trainer, pl_module, *args)
            self.own_seconds[-1] += time.perf_counter() - began

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self.seconds[self.is_on].append(time.perf_counter() - self._began)


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
        max_epochs=2 * (rounds + WARM_UP_ROUNDS),
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
    """Print the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8, help="number N of hosts")
    parser.add_argument("--executor", default="threads", help="executor that trains the hosts")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of rollouts that count")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        run = measure(args.hosts, args.executor, args.rounds, Path(folder))
    off, on = (np.array(seconds[WARM_UP_ROUNDS:]) for seconds in run.seconds)
    own, (low, high) = np.array(run.own_seconds[WARM_UP_ROUNDS:]), np.quantile(on / off - 1.0, (0.25, 0.75))
    print(f"a rollout takes {off.mean():.2f} s without telemetry, {on.mean():.2f} s with it")
    print(f"cost {on.mean() / off.mean() - 1.0:+.1%} (quartiles by round {low:+.1%} … {high:+.1%})")
    print(f"in its own code {own.mean() / off.mean():.1%}, median {np.median(own) / np.median(off):.1%}")


if __name__ == "__main__":
    main()
