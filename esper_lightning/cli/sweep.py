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

from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.runtime.console import print_status, wide_console
from esper_lightning.runtime.parallel import check_jobs

COLUMNS = ("objective", "score", "parameters", "fossils")
"""Columns of the table: means over hosts and RNG seeds of the trained policy."""

WITH_INTERVAL = ("objective", "score")

OUTPUT_FILE, RUNS_FILE, TABLE_FILE = "output.txt", "runs.csv", "table.csv"
"""Output of a run in its folder; all runs, and the table, in the folder of the sweep."""


class SweepRun(NamedTuple):
    """One training of a sweep, and its result."""

    arguments: list[str]  # of `fit`
    settings: dict[str, str]  # varied, by dotted name
    rng_seed: int
    folder: Path
    values: Mapping[str, Mapping[str, list[float]]] = {}  # of `COLUMNS` for each host, by task; empty if the run failed
    problem: str = ""  # last line of the output of a run that failed


def sweep(
    config: str, *, seeds: int = 3, set: dict[str, list[Any]] | None = None, jobs: int = 1, out: str = "runs/sweep"
) -> None:
    """Train with several RNG seeds and settings, and print and save one table of the results.

    Args:
        config: Config of every run, a path or a name; several, with commas between them, are read in order.
        seeds: Number of RNG seeds: 0, 1 and so on.
        set: Settings to vary, each with the list of its values, as in '{model.ppo.lr: [0.001, 0.003]}'.
        jobs: Runs side by side, each on a core.
        out: Folder of the sweep, which must be empty.
    """
    check_jobs(jobs)
    folder = Path(out)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder {out!r} is not empty; name another one by --out")
    folder.mkdir(parents=True, exist_ok=True)
    runs = plan(config.split(","), set or {}, range(seeds), folder)
    print_status(f"{len(runs)} runs, {min(jobs, len(runs))} at a time, each with its output in {OUTPUT_FILE}")
    results: list[SweepRun] = []
    with ThreadPoolExecutor(jobs) as threads:  # each waits for a process
        for run in threads.map(train_once, runs):
            results.append(run)
            said = ", ".join([*(f"{name}={value}" for name, value in run.settings.items()), f"seed {run.rng_seed}"])
            objectives = ", ".join(f"{np.mean(values['objective']):.3f}" for values in run.values.values())
            print_status(f"{len(results)} of {len(runs)}: {said}: {run.problem or f'objective {objectives}'}")
            write_rows(folder / RUNS_FILE, [row for one in results for row in run_rows(one)])
    rows = table_rows(results)
    write_rows(folder / TABLE_FILE, rows)
    wide_console().print(printed_table(rows))
    print_status(f"written to {folder}: {TABLE_FILE}, {RUNS_FILE}")
    failed = [run for run in results if run.problem]
    if failed:
        raise ValueError(f"{len(failed)} of {len(runs)} runs failed: {failed[0].problem.removeprefix('error: ')}")


def plan(
    configs: Sequence[str], varied: Mapping[str, Sequence[Any]], rng_seeds: Sequence[int], folder: Path
) -> list[SweepRun]:
    """Return one run for each combination of the varied settings and each RNG seed, each with a folder of its own."""
    runs = []
    for number, values in enumerate(product(*varied.values())):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        settings = dict(zip(varied, texts, strict=True))
        words = [re.sub(r"[^\w.=+-]+", "-", f"{name.rpartition('.')[2]}={value}") for name, value in settings.items()]
        place = folder / "_".join([f"{number:03}", *words])[:100]
        arguments = [
            *(f"--config={config}" for config in configs),
            *("--model.evaluation.against=[]", "--model.evaluation.controls=false"),
            *(f"--{name}={value}" for name, value in settings.items()),  # behind all else, which it replaces
        ]
        for seed in rng_seeds:
            own = [f"--seed_everything={seed}", f"--trainer.default_root_dir={place / f'seed{seed}'}"]
            runs.append(SweepRun([*arguments, *own], settings, seed, place / f"seed{seed}"))
    return runs


def train_once(run: SweepRun) -> SweepRun:
    """Train one run in a process of its own, with its output in a file, and return it with its results."""
    run.folder.mkdir(parents=True)
    output = run.folder / OUTPUT_FILE
    with output.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "esper_lightning", "fit", *run.arguments]
        ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        lines = output.read_text(encoding="utf-8").strip().splitlines()
        return run._replace(problem=lines[-1] if lines else f"its process ended with {ended.returncode}")
    values = {}
    for path in sorted(run.folder.rglob("evaluation.csv")):
        with path.open(newline="", encoding="utf-8") as opened:
            rows = [row for row in csv.DictReader(opened) if row["controller"] == "tamiyo"]
        task = "" if path.parent.name == "evaluation" else path.parent.name
        values[task] = {column: [float(row[column]) for row in rows] for column in COLUMNS}
    missing = "" if values else "there was no comparison; set model.evaluation.hosts to at least 2"
    return run._replace(values=values, problem=missing)


def run_rows(run: SweepRun) -> list[dict[str, str]]:
    """Return one row per task of a run: means over hosts, the folder, and the problem if it failed."""
    rows = []
    for task, by_column in (run.values or {"": {}}).items():
        means = {column: f"{np.mean(numbers):.6g}" for column, numbers in by_column.items()}
        given = {**run.settings, **({"task": task} if task else {}), "rng_seed": str(run.rng_seed)}
        rows.append(given | means | {"folder": str(run.folder), "problem": run.problem})
    return rows


def table_rows(runs: Sequence[SweepRun]) -> list[dict[str, str]]:
    """Return one row per setting and task: means over RNG seeds and hosts, with 95 % intervals."""
    rows = []
    for settings in dict.fromkeys(tuple(run.settings.items()) for run in runs):
        own = [run for run in runs if tuple(run.settings.items()) == settings]
        done = [run for run in own if not run.problem]
        for task in done[0].values if done else [""]:
            row = {**dict(settings), **({"task": task} if task else {}), "runs": str(len(done))}
            row["failed"] = str(len(own) - len(done))
            for column in COLUMNS if done else ():
                values = np.array([run.values[task][column] for run in done])  # [S, H]
                row[column] = f"{values.mean():.6g}"
                if column in WITH_INTERVAL:
                    interval = mean_interval(values)
                    row |= {f"{column}_low": f"{interval.low:.6g}", f"{column}_high": f"{interval.high:.6g}"}
            rows.append(row)
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write rows as CSV, replacing an existing file; a row without a column has an empty cell there."""
    names = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def printed_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return the table for the terminal: an interval as half its width."""
    columns = dict.fromkeys(column for row in rows for column in row)
    names = [name for name in columns if not name.endswith(("_low", "_high"))]
    table = Table(*names, title="means over runs and hosts, test data, ± 95 % interval")
    for row in rows:
        cells = {name: row.get(name, "") for name in names}
        for name in WITH_INTERVAL:
            if name in row:
                half = (float(row[f"{name}_high"]) - float(row[f"{name}_low"])) / 2
                cells[name] = f"{float(row[name]):.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")
        table.add_row(*cells.values())
    return table
