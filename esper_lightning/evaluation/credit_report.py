"""Credit of fossilized seeds as a terminal table and as a CSV file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from esper_lightning.evaluation.credit import CreditConfig, SeedCredit
from esper_lightning.evaluation.intervals import Interval, mean_interval
from esper_lightning.evaluation.report import make_table, show, write_rows


def seed_table(seeds: Sequence[SeedCredit], config: CreditConfig) -> Table:
    """Return a table with one row per blueprint: mean credit of its fossilized seeds, with intervals over seeds."""
    result = make_table(
        f"fossilized seeds of the first {config.hosts} hosts: accuracy points on test images, mean ± 95 % interval",
        f"caused: {config.fork_ticks} more host epochs with the seed minus the same without it",
        ("blueprint", "seeds", "switched off", "fair share", "caused"),
    )
    for blueprint in sorted({seed.blueprint for seed in seeds}):
        of = [seed for seed in seeds if seed.blueprint == blueprint]
        columns = [
            np.array([seed.contribution for seed in of]),
            np.array([seed.shapley.value for seed in of]),
            np.array([seed.effect.mean for seed in of]),
        ]
        result.add_row(blueprint, str(len(of)), *(show(mean_interval(column), 2) for column in columns))
    return result


def write_seeds(seeds: Sequence[SeedCredit], folder: Path) -> None:
    """Write `seeds.csv` with one row per fossilized seed, in accuracy points."""
    effect = [f"effect_{end}" for end in Interval._fields]
    rows = [["host", "slot", "blueprint", "contribution", "shapley", "shapley_error", "interaction", *effect]]
    for seed in seeds:
        numbers = (seed.contribution, *seed.shapley, seed.interaction, *seed.effect)
        shown = ["" if number is None else f"{number:.6g}" for number in numbers]
        rows.append([str(seed.host), seed.slot, seed.blueprint, *shown])
    write_rows(folder / "seeds.csv", rows)
