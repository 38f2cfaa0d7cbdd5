"""Baselines of the comparison: hand-written controllers, and fixed schedules from files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from esper_lightning.controllers.fixed_schedule import FixedSchedule
from esper_lightning.controllers.heuristic import Heuristic, HeuristicConfig
from esper_lightning.controllers.hill_climbing import ClimbingConfig, HillClimbing
from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.periodic import Periodic, PeriodicConfig
from esper_lightning.controllers.random import RandomValid, WaitOnly
from esper_lightning.controllers.schedule import Schedule, actions_by_tick, read_schedule
from esper_lightning.envs import HostPool

UNGROWN_HOST = "small static"
"""Name of the controller that never grows the host."""

HAND_WRITTEN = ("heuristic", "periodic", "climbing", "climbing, zero")
"""Candidates for the best baseline: controllers that react to observations or follow a clock."""


def make_baselines(
    rng_seed: int, *, heuristic: HeuristicConfig, climbing: ClimbingConfig, periodic: PeriodicConfig
) -> dict[str, Controller]:
    """Return by name the two trivial controllers (random, never grow) and the rule-based ones."""
    return {
        "random": RandomValid(rng_seed),
        UNGROWN_HOST: WaitOnly(),
        "heuristic": Heuristic(heuristic),
        "periodic": Periodic(periodic),
        "climbing": HillClimbing(climbing),
        "climbing, zero": HillClimbing(replace(climbing, zero_gradient=True)),
    }


def read_schedules(files: Mapping[str, str]) -> dict[str, Schedule]:
    """Return schedules by name. Raises ValueError, naming the file, if one cannot be read."""
    return {name: read_schedule(Path(file)) for name, file in files.items()}


def check_schedules(schedules: Mapping[str, Schedule], pool: HostPool) -> None:
    """Raise ValueError unless all schedules fit the pool's hosts."""
    for name, schedule in schedules.items():
        try:
            actions_by_tick(schedule, pool)
        except ValueError as error:
            raise ValueError(f"schedule {name!r}: {error}") from error


def make_fixed_schedules(schedules: Mapping[str, Schedule]) -> dict[str, Controller]:
    """Return one controller per schedule, by name."""
    return {name: FixedSchedule(schedule) for name, schedule in schedules.items()}
