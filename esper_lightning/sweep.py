"""The command `sweep`: trainings with several RNG seeds and settings side by side, and one table of their results."""

import csv
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from esper_lightning.console import print_status, wide_console
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.parallel import check_jobs

COLUMNS = ("objective", "accuracy", "parameters", "fossils")
"""Columns of the table: means over hosts and RNG seeds of the trained policy."""

WITH_INTERVAL = ("objective", "accuracy")

OUTPUT_FILE, RUNS_FILE, TABLE_FILE = "output.txt", "runs.csv", "table.csv"
"""Output of a run in its folder; all runs, and the table, in the folder of the sweep."""


class SweepRun(NamedTuple):
    """One training of a sweep."""

    settings: dict[str, str]
    """Varied settings, by dotted name."""
    rng_seed: int
    configs: list[str]
    folder: Path

    @property
    def arguments(self) -> list[str]:
        """Arguments of `fit`. What is varied comes last, so that it replaces all else."""
        return [
            *(part for config in self.configs for part in ("--config", config)),
            *("--model.evaluation.against=[]", "--model.evaluation.controls=false"),
            *(f"--{name}={value}" for name, value in self.settings.items()),
            *(f"--seed_everything={self.rng_seed}", f"--trainer.default_root_dir={self.folder}"),
        ]


class SweepResult(NamedTuple):
    """Result of one training."""

    run: SweepRun
    values: dict[str, dict[str, list[float]]]
    """Values of `COLUMNS` for each host, by task and column; empty if the run failed."""
    problem: str = ""
    """Last line of the output of a run that failed."""


def sweep(
    config: str, *, seeds: int = 3, set: dict[str, list[Any]] | None = None, jobs: int = 1, out: str = "runs/sweep"
) -> None:
    """Train with several RNG seeds and settings, and print and save one table of the results.

    Args:
        config: Config of every run: a path, or the name of one of the package. Several, with commas between them, are
            read in order.
        seeds: Number of RNG seeds: 0, 1 and so on.
        set: Settings to vary, each with the list of its values, as in '{model.ppo.lr: [0.001, 0.003]}'. All values are
            combined with each other.
        jobs: Runs side by side, each on a core.
        out: Folder of the sweep, which must be empty.
    """
    check_jobs(jobs)
    folder = Path(out)
    varied = {
        name: [v if isinstance(v, str) else json.dumps(v) for v in values] for name, values in (set or {}).items()
    }
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder {out!r} is not empty; name another one by --out")
    folder.mkdir(parents=True, exist_ok=True)
    runs = plan(config.split(","), varied, range(seeds), folder)
    print_status(f"{len(runs)} runs, {min(jobs, len(runs))} at a time, each with its output in {OUTPUT_FILE}")
    results: list[SweepResult] = []
    with ThreadPoolExecutor(jobs) as threads:  # each waits for a process
        for result in threads.map(train_once, runs):
            results.append(result)
            said = [*(f"{name}={value}" for name, value in result.run.settings.items()), f"seed {result.run.rng_seed}"]
            objectives = [f"{np.mean(by_column['objective']):.3f}" for by_column in result.values.values()]
            outcome = result.problem or f"objective {', '.join(objectives)}"
            print_status(f"{len(results)} of {len(runs)}: {', '.join(said)}: {outcome}")
            write_rows(folder / RUNS_FILE, run_rows(results))
    rows = table_rows(results)
    write_rows(folder / TABLE_FILE, rows)
    wide_console().print(printed_table(rows, list(varied)))
    print_status(f"written to {folder}: {TABLE_FILE}, {RUNS_FILE}")
    failed = [result for result in results if result.problem]
    if failed:
        raise ValueError(f"{len(failed)} of {len(runs)} runs failed: {failed[0].problem.removeprefix('error: ')}")


def train_once(run: SweepRun) -> SweepResult:
    """Train one run in a process of its own, with its output in a file, and return the results of its comparison."""
    run.folder.mkdir(parents=True)
    output = run.folder / OUTPUT_FILE
    with output.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "esper_lightning", "fit", *run.arguments]
        ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        lines = output.read_text(encoding="utf-8").strip().splitlines()
        return SweepResult(run, {}, lines[-1] if lines else f"its process ended with {ended.returncode}")
    values = {}
    for path in sorted(run.folder.rglob("evaluation.csv")):
        with path.open(newline="", encoding="utf-8") as opened:
            rows = [row for row in csv.DictReader(opened) if row["controller"] == "tamiyo"]
        task = "" if path.parent.name == "evaluation" else path.parent.name
        values[task] = {column: [float(row[column]) for row in rows] for column in COLUMNS}
    problem = "" if values else "there was no comparison; set model.evaluation.hosts to at least 2"
    return SweepResult(run, values, problem)


def plan(
    configs: Sequence[str], varied: Mapping[str, Sequence[str]], rng_seeds: Sequence[int], folder: Path
) -> list[SweepRun]:
    """Return one run for each combination of the varied settings and each RNG seed, each with a folder of its own."""
    runs = []
    for number, values in enumerate(product(*varied.values())):
        settings = dict(zip(varied, values, strict=True))
        words = [re.sub(r"[^\w.=+-]+", "-", f"{name.rpartition('.')[2]}={value}") for name, value in settings.items()]
        name = "_".join([f"{number:03}", *words])[:100]
        runs += [SweepRun(settings, seed, list(configs), folder / name / f"seed{seed}") for seed in rng_seeds]
    return runs


def table_rows(results: Sequence[SweepResult]) -> list[dict[str, str]]:
    """Return one row per setting and task: means over RNG seeds and hosts, with 95 % intervals."""
    rows = []
    for settings in dict.fromkeys(tuple(result.run.settings.items()) for result in results):
        own = [result for result in results if tuple(result.run.settings.items()) == settings]
        done = [result for result in own if not result.problem]
        for task in list(dict.fromkeys(task for result in done for task in result.values)) or [""]:
            row = {**dict(settings), **({"task": task} if task else {}), "runs": str(len(done))}
            row["failed"] = str(len(own) - len(done))
            for column in COLUMNS if done else ():
                values = np.array([result.values[task][column] for result in done])  # [S, H]
                row[column] = f"{values.mean():.6g}"
                if column in WITH_INTERVAL:
                    interval = mean_interval(values)
                    row |= {f"{column}_low": f"{interval.low:.6g}", f"{column}_high": f"{interval.high:.6g}"}
            rows.append(row)
    return rows


def run_rows(results: Sequence[SweepResult]) -> list[dict[str, str]]:
    """Return one row per run and task: means over hosts, the folder, and the problem of a run that failed."""
    rows = []
    for run, values, problem in results:
        for task, by_column in (values or {"": {}}).items():
            means = {column: f"{np.mean(numbers):.6g}" for column, numbers in by_column.items()}
            given = {**run.settings, **({"task": task} if task else {}), "rng_seed": str(run.rng_seed)}
            rows.append(given | means | {"folder": str(run.folder), "problem": problem})
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write rows as CSV, replacing an existing file; a row without a column has an empty cell there."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, list(dict.fromkeys(column for row in rows for column in row)), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)


def printed_table(rows: Sequence[Mapping[str, str]], varied: Sequence[str]) -> Table:
    """Return the table for the terminal: an interval as half its width."""
    names = [*varied, *(["task"] if any("task" in row for row in rows) else []), "runs", *COLUMNS]
    table = Table(title="means over runs and hosts, test data, ± 95 % interval")
    for name in names:
        table.add_column(name, justify="left" if name in varied else "right")
    for row in rows:
        cells = []
        for name in names:
            text = row.get(name, "")
            if name == "runs" and row["failed"] != "0":
                text += f" ({row['failed']} failed)"
            if name in WITH_INTERVAL and text:
                half = (float(row[f"{name}_high"]) - float(row[f"{name}_low"])) / 2
                text = f"{float(text):.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")
            cells.append(text)
        table.add_row(*cells)
    return table
