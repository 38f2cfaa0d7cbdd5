"""Who is compared with Tamiyo: hand-written rules, and fixed schedules from files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from esper_lightning.envs import HostPool
from esper_lightning.tamiyo.baselines import RandomValid, WaitOnly
from esper_lightning.tamiyo.climbing import ClimbingConfig, HillClimbing
from esper_lightning.tamiyo.controller import Controller
from esper_lightning.tamiyo.heuristic import Heuristic, HeuristicConfig
from esper_lightning.tamiyo.periodic import Periodic, PeriodicConfig
from esper_lightning.tamiyo.replay import FixedSchedule
from esper_lightning.tamiyo.schedule import Schedule, decisions, read_schedule

SMALL_STATIC = "small static"
"""The host that never grows."""

HAND_WRITTEN = ("heuristic", "periodic", "climbing", "climbing, zero")
"""Among these the best rule is looked for: they decide by what they see, or by a clock."""


def make_rules(
    seed: int, heuristic: HeuristicConfig, climbing: ClimbingConfig, periodic: PeriodicConfig
) -> dict[str, Controller]:
    """The simplest controllers, and the hand-written ones."""
    return {
        "random": RandomValid(seed),
        SMALL_STATIC: WaitOnly(),
        "heuristic": Heuristic(heuristic),
        "periodic": Periodic(periodic),
        "climbing": HillClimbing(climbing),
        "climbing, zero": HillClimbing(replace(climbing, zero_gradient=True)),
    }


def read_schedules(files: Mapping[str, str]) -> dict[str, Schedule]:
    """Schedules by name. Raises ValueError, naming the file, if one cannot be read."""
    return {name: read_schedule(Path(file)) for name, file in files.items()}


def check_schedules(schedules: Mapping[str, Schedule], pool: HostPool) -> None:
    """Raises ValueError unless all of them are for hosts like the pool's."""
    for name, schedule in schedules.items():
        try:
            decisions(schedule, pool)
        except ValueError as error:
            raise ValueError(f"schedule {name!r}: {error}") from error


def fixed(schedules: Mapping[str, Schedule]) -> dict[str, Controller]:
    """A controller for each."""
    return {name: FixedSchedule(schedule) for name, schedule in schedules.items()}
