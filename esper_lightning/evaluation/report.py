"""A comparison as a table for people, and as files for programs."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from esper_lightning.evaluation.compare import Interval, Outcome, mean_interval, paired_difference
from esper_lightning.evaluation.credit import CreditConfig, SeedCredit
from esper_lightning.growth.saving import replace_file

COLUMNS = ("accuracy", "parameters", "objective")


def show(interval: Interval, digits: int) -> str:
    """`0.573 ± 0.017`"""
    return f"{interval.mean:.{digits}f} ± {(interval.high - interval.low) / 2:.{digits}f}"


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row per controller; differences are of the objective, first controller minus this one, host by host."""
    first = outcomes[0]
    result = Table(
        title=f"{len(first.objective)} fresh hosts, test images, mean ± 95 % interval",
        caption=f"{first.controller} ahead: objective of {first.controller} minus this row's, paired by host",
    )
    for heading in ("controller", "test accuracy", "parameters", "objective", f"{first.controller} ahead"):
        result.add_column(heading, justify="left" if heading == "controller" else "right", no_wrap=True)
    for outcome in outcomes:
        ahead = "" if outcome is first else show(paired_difference(first, outcome), 3)
        accuracy, parameters, worth = (mean_interval(getattr(outcome, column)) for column in COLUMNS)
        result.add_row(outcome.controller, show(accuracy, 3), show(parameters, 0), show(worth, 3), ahead)
    return result


def write(outcomes: Sequence[Outcome], folder: Path) -> None:
    """`evaluation.csv`: the table; `evaluation.json`: every host of every controller."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = ("mean", "low", "high")
    rows = [["controller", "hosts", *(f"{column}_{end}" for column in (*COLUMNS, "ahead") for end in ends)]]
    for outcome in outcomes:
        intervals = [mean_interval(getattr(outcome, column)) for column in COLUMNS]
        intervals.append(paired_difference(outcomes[0], outcome))
        numbers = [f"{number:.6g}" for interval in intervals for number in interval]
        rows.append([outcome.controller, str(len(outcome.objective)), *numbers])
    write_rows(folder / "evaluation.csv", rows)
    hosts = {o.controller: {column: getattr(o, column).tolist() for column in COLUMNS} for o in outcomes}
    replace_file(folder / "evaluation.json", lambda path: path.write_text(json.dumps(hosts, indent=1) + "\n"))


def write_rows(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """A CSV file in place of whatever was there."""

    def write_draft(draft: Path) -> None:
        with draft.open("w", newline="") as file:
            csv.writer(file).writerows(rows)

    replace_file(path, write_draft)


def seed_table(seeds: Sequence[SeedCredit], config: CreditConfig) -> Table:
    """One row per blueprint: what its fossils are worth on average, with intervals over seeds."""
    result = Table(
        title=f"seeds kept by the first {config.hosts} hosts: accuracy points on test images, mean ± 95 % interval",
        caption=f"caused: {config.fork_ticks} more host epochs with the seed minus the same without it",
    )
    for heading in ("blueprint", "seeds", "switched off", "fair share", "caused"):
        result.add_column(heading, justify="left" if heading == "blueprint" else "right", no_wrap=True)
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
    """`seeds.csv`: one row per fossil, in accuracy points."""
    effect = [f"effect_{end}" for end in Interval._fields]
    rows = [["host", "slot", "blueprint", "contribution", "shapley", "shapley_error", "interaction", *effect]]
    for seed in seeds:
        numbers = (seed.contribution, *seed.shapley, seed.interaction, *seed.effect)
        shown = ["" if number is None else f"{number:.6g}" for number in numbers]
        rows.append([str(seed.host), seed.slot, seed.blueprint, *shown])
    write_rows(folder / "seeds.csv", rows)
