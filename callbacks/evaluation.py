"""Evaluation: at the end of training, Tamiyo against simple rules on hosts that she has never met."""

from dataclasses import replace
from pathlib import Path

from lightning import Callback, Trainer
from rich.console import Console

from esper_lightning.data import HostPoolData
from esper_lightning.evaluation.compare import Outcome, play
from esper_lightning.evaluation.credit import CreditConfig, SeedCredit, credit_seeds
from esper_lightning.evaluation.report import seed_table, table, write, write_seeds
from esper_lightning.evaluation.search import SearchConfig, search
from esper_lightning.module import TamiyoModule
from esper_lightning.rollout import EVALUATION, episode_seeds
from esper_lightning.tamiyo.baselines import RandomValid, WaitOnly
from esper_lightning.tamiyo.climbing import ClimbingConfig, HillClimbing
from esper_lightning.tamiyo.controller import Controller
from esper_lightning.tamiyo.heuristic import Heuristic, HeuristicConfig
from esper_lightning.tamiyo.periodic import Periodic, PeriodicConfig
from esper_lightning.tamiyo.replay import FixedSchedule, Recording, most_common
from esper_lightning.tamiyo.sampled import SampledController
from esper_lightning.tamiyo.schedule import read_schedule, write_schedule

RACERS = 96
"""Environments in which schedules are raced side by side."""


class Evaluation(Callback):
    """Prints a table of controllers on the same fresh hosts and writes it to the run's folder.

    Args:
        hosts: Number of hosts; their test images are never used for rewards. 0: no evaluation.
        seed: Decides which hosts. The same number gives the same hosts in every run.
        heuristic: Settings of the hand-written rule.
        credit: Whether and how closely the seeds that Tamiyo kept are looked at.
        climbing: Settings of hill climbing, which is compared with and without its rule about dead seeds.
        periodic: Settings of the clock.
        search: How the best fixed schedule is searched, which takes minutes. None: it is not.
        schedule: A file with a schedule to compare with, too.
    """

    def __init__(
        self,
        hosts: int = 64,
        seed: int = 0,
        heuristic: HeuristicConfig = HeuristicConfig(),
        credit: CreditConfig = CreditConfig(),
        climbing: ClimbingConfig = ClimbingConfig(),
        periodic: PeriodicConfig = PeriodicConfig(),
        search: SearchConfig | None = None,
        schedule: str | None = None,
    ) -> None:
        if hosts < 0 or hosts == 1:
            raise ValueError(f"evaluation.hosts must be 0 (none) or at least 2 (for an interval), got {hosts}")
        if seed < 0:
            raise ValueError(f"evaluation.seed must not be negative, got {seed}")
        self.hosts = hosts
        self.seed = seed
        if credit.hosts > hosts:
            raise ValueError(f"evaluation.credit.hosts is {credit.hosts}, more than the {hosts} that are evaluated")
        self.rules: dict[str, Controller] = {
            "random": RandomValid(seed),
            "wait": WaitOnly(),
            "heuristic": Heuristic(heuristic),
            "periodic": Periodic(periodic),
            "climbing": HillClimbing(climbing),
            "climbing, zero": HillClimbing(replace(climbing, zero_gradient=True)),
        }
        if schedule is not None:
            self.rules["schedule"] = FixedSchedule(read_schedule(Path(schedule)))
        self.credit = credit
        self.search = search
        self.outcomes: list[Outcome] = []
        self.seeds: list[SeedCredit] = []

    def on_fit_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        if self.hosts == 0:
            return
        pool = trainer.datamodule.make_pool(self.hosts, pl_module.loop.pool.device)
        seeds = episode_seeds(self.seed, EVALUATION, 0, self.hosts)
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        ours = Recording(pl_module.controller())
        self.outcomes = [play(pool, "tamiyo", ours, seeds)]
        sampled = SampledController(pl_module.policy, pl_module.observation_norm, self.seed)
        rules = {"sampled": sampled} | self.rules | self._schedules(ours, trainer.datamodule, folder)
        if self.credit.hosts:
            pairs_pool = trainer.datamodule.make_pool(2 * self.credit.repetitions, pool.device)
            self.seeds = credit_seeds(pool, pairs_pool, self.credit)
        self.outcomes += [play(pool, name, controller, seeds) for name, controller in rules.items()]
        if trainer.is_global_zero:
            write(self.outcomes, folder)
            console = Console()
            console.print(table(self.outcomes))
            if self.credit.hosts:
                write_seeds(self.seeds, folder)
                kept = (
                    seed_table(self.seeds, self.credit) if self.seeds else "tamiyo kept no seed on the hosts looked at"
                )
                console.print(kept)
            console.print(f"written to {folder / 'evaluation.csv'}", soft_wrap=True)

    def _schedules(self, ours: Recording, data: HostPoolData, folder: Path) -> dict[str, Controller]:
        """What Tamiyo did most often, blindly repeated, and the best schedule that can be found; both as files."""
        common, hosts = most_common(ours.schedules)
        write_schedule(common, folder / "schedule.json")
        Console().print(f"{hosts} of {self.hosts} hosts grew by the same schedule: {folder / 'schedule.json'}")
        found: dict[str, Controller] = {"replayed": FixedSchedule(common)}
        if self.search is not None:
            best = search(data.make_pool(RACERS, data.pool.device), self.search).schedule
            write_schedule(best, folder / "best_schedule.json")
            found["best fixed"] = FixedSchedule(best)
        return found
