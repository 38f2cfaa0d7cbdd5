"""Evaluation: at the end of training, Tamiyo against simple rules on hosts that she has never met."""

from pathlib import Path

from lightning import Callback, Trainer
from rich.console import Console

from esper_lightning.evaluation.compare import Outcome, play
from esper_lightning.evaluation.report import table, write
from esper_lightning.module import TamiyoModule
from esper_lightning.rollout import EVALUATION, episode_seeds
from esper_lightning.tamiyo.baselines import RandomValid, WaitOnly
from esper_lightning.tamiyo.controller import Controller
from esper_lightning.tamiyo.heuristic import Heuristic, HeuristicConfig


class Evaluation(Callback):
    """Prints a table of controllers on the same fresh hosts and writes it to the run's folder.

    Args:
        hosts: Number of hosts; their test images are never used for rewards. 0: no evaluation.
        seed: Decides which hosts. The same number gives the same hosts in every run.
        heuristic: Settings of the hand-written rule.
    """

    def __init__(
        self,
        hosts: int = 64,
        seed: int = 0,
        heuristic: HeuristicConfig = HeuristicConfig(),
    ) -> None:
        if hosts < 0 or hosts == 1:
            raise ValueError(f"evaluation.hosts must be 0 (none) or at least 2 (for an interval), got {hosts}")
        if seed < 0:
            raise ValueError(f"evaluation.seed must not be negative, got {seed}")
        self.hosts = hosts
        self.seed = seed
        self.heuristic = heuristic
        self.outcomes: list[Outcome] = []

    def on_fit_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        if self.hosts == 0:
            return
        pool = trainer.datamodule.make_pool(self.hosts, pl_module.loop.pool.device)
        seeds = episode_seeds(self.seed, EVALUATION, 0, self.hosts)
        controllers: dict[str, Controller] = {
            "tamiyo": pl_module.controller(),
            "random": RandomValid(self.seed),
            "wait": WaitOnly(),
            "heuristic": Heuristic(self.heuristic),
        }
        try:
            self.outcomes = [play(pool, name, controller, seeds) for name, controller in controllers.items()]
        except KeyboardInterrupt:
            print("trained, but not compared; for the table resume from the run's latest.ckpt", flush=True)
            raise SystemExit(130) from None
        if trainer.is_global_zero:
            folder = Path(trainer.log_dir or trainer.default_root_dir)
            write(self.outcomes, folder)
            console = Console()
            console.print(table(self.outcomes))
            console.print(f"written to {folder / 'evaluation.csv'}", soft_wrap=True)
