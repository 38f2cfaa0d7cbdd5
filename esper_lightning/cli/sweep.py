"""The command `sweep`: trainings with several RNG seeds and settings side by side, and one table of their results."""

import csv
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from jsonargparse.typing import PositiveInt
from rich.table import Table

from esper_lightning.cli import PROGRAM
from esper_lightning.cli.parser import Parser
from esper_lightning.cli.yaml_limits import check_limits
from esper_lightning.console import exit_with_error, print_status, wide_console
from esper_lightning.errors import one_line_errors, one_line_system_errors
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.parallel import Mapper, Processes, check_jobs, make_executor
from esper_lightning.process import exits_on_signals
from esper_lightning.serialization.replace import make_folder, replace_file

COMMAND = "sweep"

CONTROLLER = "tamiyo"
"""Row of a comparison whose results are tabulated: the trained policy."""

COLUMNS = ("objective", "accuracy", "parameters", "fossils")
"""Columns of the table: means over hosts and RNG seeds."""

WITH_INTERVAL = ("objective", "accuracy")

OUTPUT_FILE, RUNS_FILE, TABLE_FILE = "output.txt", "runs.csv", "table.csv"
"""Output of a run in its folder; all runs, and the table, in the folder of the sweep."""

EVALUATION = "evaluation"
"""Folder of a comparison in the folder of a run. With several tasks it has a folder for each."""

SET_HELP = """Settings to vary, each with its values: SETTING=VALUE,VALUE. All values are combined with each other.
Commas within brackets separate nothing."""

EXECUTOR_HELP = """Dotted path of a class or function that makes another executor from the number of jobs, such as
ray.util.multiprocessing.Pool. Left out: processes on this machine."""

MAX_RUNS = 10_000
"""Largest number of trainings in a sweep."""

DIED = "its process died twice: killed, or out of memory"
EXIT_DIED = 1


class SweepRun(NamedTuple):
    """One training of a sweep."""

    settings: tuple[tuple[str, str], ...]
    """Varied settings, by dotted name."""
    rng_seed: int
    configs: tuple[str, ...]
    folder: Path

    @property
    def arguments(self) -> list[str]:
        """Arguments of `fit`. What is varied comes last, so that it replaces all else."""
        return [
            *(part for config in self.configs for part in ("--config", config)),
            *(f"--{EVALUATION}.against=[]", f"--{EVALUATION}.controls=false", "--trainer.enable_progress_bar=false"),
            *(f"--{name}={value}" for name, value in self.settings),
            *(f"--seed_everything={self.rng_seed}", f"--trainer.default_root_dir={self.folder}"),
        ]


class SweepResult(NamedTuple):
    """Result of one training."""

    run: SweepRun
    values: dict[str, dict[str, list[float]]]
    """Values of `COLUMNS` for each host, by task and column; empty if the run failed."""
    problem: str = ""
    """Last line of the output of a run that failed."""
    exit_code: int = 0


Fit = Callable[[list[str]], None]
"""Runs the command line with arguments."""


def train_once(fit: Fit, run: SweepRun) -> SweepResult:
    """Train one run in this process, with its output in a file, and return the results of its comparison."""
    run.folder.mkdir(parents=True, exist_ok=True)
    earlier = set(run.folder.glob("version_*"))
    output = run.folder / OUTPUT_FILE
    code: Any = 0
    with output.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            fit(["fit", *run.arguments])
        except SystemExit as ended:
            code = ended.code
    if code not in (0, None):
        lines = output.read_text(encoding="utf-8").strip().splitlines()
        return SweepResult(run, {}, lines[-1] if lines else "no output", int(code))
    (folder,) = set(run.folder.glob("version_*")) - earlier
    values = read_values(folder / EVALUATION)
    if not values:
        return SweepResult(run, {}, "there was no comparison; set evaluation.hosts to at least 2", 2)
    return SweepResult(run, values)


def read_values(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the policy's results for each host by task and column; the task is empty if there is only one."""
    values = {}
    for file in sorted(folder.rglob("evaluation.csv")):
        with file.open(newline="", encoding="utf-8") as opened:
            rows = [row for row in csv.DictReader(opened) if row["controller"] == CONTROLLER]
        task = "" if file.parent == folder else file.parent.name
        values[task] = {column: [float(row[column]) for row in rows] for column in COLUMNS}
    return values


def report_death(run: SweepRun) -> SweepResult:
    """Return the result of a run whose processes have died."""
    return SweepResult(run, {}, DIED, EXIT_DIED)


def plan(
    configs: Sequence[str], varied: Mapping[str, Sequence[str]], rng_seeds: Sequence[int], folder: Path
) -> list[SweepRun]:
    """Return one run for each combination of the varied settings and each RNG seed, each with a folder of its own."""
    runs = []
    for number, values in enumerate(product(*varied.values())):
        settings = tuple(zip(varied, values, strict=True))
        words = [re.sub(r"[^\w.=+-]+", "-", f"{name.rpartition('.')[2]}={value}") for name, value in settings]
        name = "_".join([f"{number:03}", *words])[:100]
        runs += [SweepRun(settings, seed, tuple(configs), folder / name / f"seed{seed}") for seed in rng_seeds]
    return runs


def table_rows(results: Sequence[SweepResult]) -> list[dict[str, str]]:
    """Return one row per setting and task: means over RNG seeds and hosts, with 95 % intervals."""
    rows = []
    for settings in dict.fromkeys(result.run.settings for result in results):
        own = [result for result in results if result.run.settings == settings]
        done = [result for result in own if not result.problem]
        tasks = list(dict.fromkeys(task for result in done for task in result.values)) or [""]
        for task in tasks:
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
    for run, values, problem, _ in results:
        for task, by_column in (values or {"": {}}).items():
            means = {column: f"{np.mean(numbers):.6g}" for column, numbers in by_column.items()}
            given = {**dict(run.settings), **({"task": task} if task else {}), "rng_seed": str(run.rng_seed)}
            rows.append(given | means | {"folder": str(run.folder), "problem": problem})
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write rows as CSV, replacing an existing file; a row without a column has an empty cell there."""
    columns = list(dict.fromkeys(column for row in rows for column in row))

    def write_draft(draft: Path) -> None:
        with draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    replace_file(path, write_draft)


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
                text = f"{float(text):.3f} ± {half:.3f}"
            cells.append(text)
        table.add_row(*cells)
    return table


def sweep(fit: Fit, runs: Sequence[SweepRun], *, executor: Mapper, folder: Path) -> list[SweepResult]:
    """Train all runs, write their table, and return the results in the order of the runs."""
    results: list[SweepResult] = []
    for result in executor.map(partial(train_once, fit), runs):
        results.append(result)
        what = ", ".join([*(f"{name}={value}" for name, value in result.run.settings), f"seed {result.run.rng_seed}"])
        objectives = [np.mean(by_column["objective"]) for by_column in result.values.values()]
        said = result.problem or "objective " + ", ".join(f"{objective:.3f}" for objective in objectives)
        print_status(f"{len(results)} of {len(runs)}: {what}: {said}")
        write_rows(folder / RUNS_FILE, run_rows(results))
    return results


def split_values(text: str) -> list[str]:
    """Return the values in a text with commas between them; commas within brackets separate nothing."""
    listed = f"[{text}]"
    check_limits(listed)
    values = yaml.safe_load(listed)
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


def sweep_parser() -> Parser:
    """Return the parser of the command's arguments."""
    parser = Parser(prog=f"{PROGRAM} {COMMAND}")
    parser.add_argument("--config", nargs="+", type=str, required=True, help="Configs of every run, read in order.")
    parser.add_argument("--seeds", type=PositiveInt, default=3, help="Number of RNG seeds: 0, 1 and so on.")
    parser.add_argument("--set", nargs="+", type=str, default=[], help=SET_HELP)
    parser.add_argument("--jobs", type=PositiveInt, default=1, help="Runs side by side, each on a core.")
    parser.add_argument("--executor", type=str, help=EXECUTOR_HELP)
    parser.add_argument("--out", type=str, default="runs/sweep", help="Folder of the sweep, which must be empty.")
    return parser


def run_sweep(args: Sequence[str], fit: Fit) -> None:
    """Run the command; ends with the exit code of the first run that failed.

    Args:
        args: Arguments behind the command's name.
        fit: Function at the top of a module that runs the command line.
    """
    given = sweep_parser().parse_args(list(args))
    folder = Path(given.out)
    with one_line_errors():
        varied = dict(map(varied_setting, given.set))
        check_jobs(given.jobs)
        n_runs = given.seeds * math.prod(map(len, varied.values()))
        if n_runs > MAX_RUNS:
            raise ValueError(f"the sweep has {n_runs} runs, more than {MAX_RUNS}; give fewer RNG seeds or values")
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"folder {given.out!r} is not empty; name another one by --out")
        executor: Mapper = Processes(given.jobs, report_death)
        if given.executor is not None:
            executor = make_executor(given.executor, given.jobs)
        make_folder(folder)
    runs = plan(given.config, varied, range(given.seeds), folder)
    print_status(f"{len(runs)} runs, {min(given.jobs, len(runs))} at a time, each with its output in {OUTPUT_FILE}")
    with one_line_system_errors("start again, with another folder by --out"):
        with exits_on_signals(lambda: f"in a sweep; runs that have ended are in {folder / RUNS_FILE}"):
            results = sweep(fit, runs, executor=executor, folder=folder)
        rows = table_rows(results)
        write_rows(folder / TABLE_FILE, rows)
    wide_console().print(printed_table(rows, list(varied)))
    print_status(f"written to {folder}: {TABLE_FILE}, {RUNS_FILE}")
    failed = [result for result in results if result.problem]
    if failed:
        problem = failed[0].problem.removeprefix("error: ")
        exit_with_error(f"{len(failed)} of {len(runs)} runs failed: {problem}", failed[0].exit_code)


def varied_setting(text: str) -> tuple[str, list[str]]:
    """Return the name and the values of an argument of --set. Raises ValueError if it is none."""
    name, _, values = text.partition("=")
    if not (name and values):
        raise ValueError(f"--set {text!r}: give a setting and its values, as in --set data.env.horizon=8,12")
    try:
        return name.removeprefix("--"), split_values(values)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {text!r}: its values are no YAML; give them with commas between them") from error
