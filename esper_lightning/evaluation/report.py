"""A comparison from its settings to tables on the terminal, and CSV and JSON files in a folder.

S training seeds, T ticks, H hosts.
"""

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from esper_lightning.controllers.learned import LearnedController
from esper_lightning.controllers.schedules import write_schedule
from esper_lightning.datamodules import HostPoolData
from esper_lightning.evaluation import statistics
from esper_lightning.evaluation.checkpoints import check_training_seeds, load_policies
from esper_lightning.evaluation.comparison import (
    REPLAYED,
    TWIN_PREFIX,
    YOKED,
    Comparison,
    ComparisonResult,
    EvaluationConfig,
)
from esper_lightning.evaluation.statistics import Interval, mean_interval
from esper_lightning.runtime.console import print_status, wide_console
from esper_lightning.runtime.machine import provenance
from esper_lightning.runtime.serialization import replace_file
from esper_lightning.telemetry.events import to_plain

COLUMNS = ("score", "loss", "parameters", "objective", "flops", "ticks", "fossils", "rollbacks")
"""Columns of an outcome, with one number per host."""

RESULTS_FILE, SUMMARY_FILE = "evaluation.csv", "evaluation.json"
"""Files with one row per host and controller, and with all means."""

EVALUATION_FOLDER = "evaluation"
"""Subfolder of a run folder for the results of a comparison."""

INTERVAL_METHOD = (
    f"{100 * statistics.CONFIDENCE:g} % percentile bootstrap, {statistics.RESAMPLES} resamples, "
    f"seed {statistics.RNG_SEED}: of hosts, and where there are several training seeds of training seeds and of hosts"
)


def compare(
    config: EvaluationConfig,
    data: HostPoolData,
    trained: LearnedController,
    *,
    folder: Path,
    settings: Mapping[str, Any],
) -> dict[str, ComparisonResult]:
    """Run the comparison on hosts of each task, print and write the results, and return them by task.

    The `trained` policy is compared unless the settings name other ones. The files are written to `folder`, or, with
    several tasks, to a subfolder for each task. `settings` of the run are saved in `evaluation.json`. Raises
    ValueError if the settings do not fit the hosts.
    """
    if config.hosts == 0:
        raise ValueError("model.evaluation.hosts is 0, so there is nothing to compare; give at least 2")
    comparison = Comparison(config)
    policies = [trained] if config.policies is None else load_policies(config.policies, data)
    check_training_seeds(policies)
    rivals = load_policies(comparison.rivals, data)
    comparison.check(data)
    record = {
        "settings": dict(settings),
        "run": provenance(data.seed, data.pool.device, data.pool.executor_choice, precision=data.precision),
    }
    results = {}
    for task in data.pools:
        task_folder = folder
        if len(data.pools) > 1:
            print_status(f"hosts of {task}")
            task_folder = folder / task
        if (task_folder / RESULTS_FILE).is_file():
            print_status(f"this comparison will replace the earlier one in {task_folder}")
        results[task] = result = comparison.run(data, policies, rivals, task=task)
        for note in result.notes:
            wide_console().print(note, soft_wrap=True)
        for table in make_tables(result):
            wide_console().print(table)
        written = write_report(result, task_folder, record)
        wide_console().print(f"written to {task_folder}: {', '.join(written)}", soft_wrap=True)
        wide_console().print(conclusion(result), soft_wrap=True)
    return results


def conclusion(result: ComparisonResult) -> str:
    """Return in one sentence what the first row is worth against the best other row that is not derived from it."""
    derived = (REPLAYED, YOKED)
    others = [one for one in result.entries[1:] if one.name not in derived and not one.name.startswith(TWIN_PREFIX)]
    finite = [one for one in [result.reference, *others] if np.isfinite(one.values("objective")).all()]
    name = result.reference.name
    if result.reference not in finite or len(finite) == 1:
        return f"{name} cannot be compared: it, or every controller that is not derived from it, has no objective"
    best = max(finite[1:], key=lambda entry: float(entry.values("objective").mean()))
    lead = result.mean_lead(best)
    how = "ahead of" if lead.low > 0.0 else "behind" if lead.high < 0.0 else "level with"
    return (
        f"{name} is {how} {best.name}, the best controller beside it, on {len(result.rng_seeds)} hosts: "
        f"objective {lead.mean:+.3f} [{lead.low:.3f}, {lead.high:.3f}]"
    )


def make_tables(result: ComparisonResult) -> list[Table]:
    """Return the tables of results, costs and test metrics.

    `<first row> ahead` is the objective of the first row minus the objective of this row, paired by host. Of metrics
    that exist for each class, such as `accuracy.<class>`, the lowest mean and its class are shown.
    """
    reference, metrics = result.reference.name, list(result.reference.mean_metrics())
    plain = [name for name in metrics if "." not in name]
    by_class = list(dict.fromkeys(name.partition(".")[0] for name in metrics if "." in name))
    over = f"; mean over {len(result.policies)} training seeds" if len(result.policies) > 1 else ""
    results = Table(
        title=f"{len(result.rng_seeds)} fresh hosts, test data, mean ± 95 % interval",
        caption=f"{reference} ahead: objective of {reference} minus this row's, paired by host{over}",
    )
    costs = Table(
        title="costs, mean per host",
        caption="loss: on test data; MFLOP of training; epochs: host epochs; seconds: all hosts' whole episode",
    )
    further = Table(
        title="further test metrics, mean over hosts",
        caption="lowest: the class with the lowest mean, its number in brackets" if by_class else "",
    )
    for table, names in (
        (results, (f"test {result.score}", "objective", f"{reference} ahead")),
        (costs, ("loss", "parameters", "MFLOP", "epochs", "fossils", "rollbacks", "seconds")),
        (further, (*(name.replace("_", " ") for name in plain), *(f"lowest {name}" for name in by_class))),
    ):
        table.add_column("controller", no_wrap=True)
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
    for entry in result.entries:
        measured = [mean_interval(entry.values(column)) for column in ("score", "objective")]
        ahead = "" if entry is result.reference else format_interval(result.mean_lead(entry))
        results.add_row(entry.name, *map(format_interval, measured), ahead)
        means = {column: float(entry.values(column).mean()) for column in (*COLUMNS, "seconds")}
        size = [f"{means['loss']:.3f}", f"{means['parameters']:.0f}", f"{means['flops'] / 1e6:.3g}"]
        growth = [f"{means['ticks']:.1f}", f"{means['fossils']:.2f}", f"{means['rollbacks']:.2f}"]
        costs.add_row(entry.name, *size, *growth, f"{means['seconds']:.1f}")
        test_means = entry.mean_metrics()
        row = [f"{test_means[name]:.3f}" for name in plain]
        for group in by_class:
            lowest = min((name for name in test_means if name.startswith(f"{group}.")), key=test_means.__getitem__)
            row.append(f"{test_means[lowest]:.3f} ({lowest.partition('.')[2]})")
        further.add_row(entry.name, *row)
    return [results, costs, further]


def format_interval(interval: Interval) -> str:
    """Return `0.573 ± 0.017`, with half the width of the interval; the files contain its ends."""
    return f"{interval.mean:.3f} ± {(interval.high - interval.low) / 2:.3f}"


def write_report(result: ComparisonResult, folder: Path, record: Mapping[str, Any]) -> list[str]:
    """Write all files of a comparison, with a `record` of this process, and return the names of the main ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*"):  # of an earlier comparison of more policies; schedules of a search stay
        if re.fullmatch(r"schedule\d*\.json", path.name):
            path.unlink()
    replace_file(folder / RESULTS_FILE, lambda draft: write_rows(result, draft))
    # NaN and infinity, which JSON lacks, become null.
    text = json.dumps(to_plain({**summary(result), **record}), indent=1, allow_nan=False) + "\n"
    replace_file(folder / SUMMARY_FILE, lambda draft: draft.write_text(text))
    for name, schedule in result.schedules.items():
        write_schedule(schedule, folder / f"{name}.json")
    return [RESULTS_FILE, SUMMARY_FILE]


def write_rows(result: ComparisonResult, path: Path) -> None:
    """Write a row for each host of each outcome as CSV: its columns, then the further test metrics of the task."""
    metrics = [name for name in result.reference.mean_metrics() if name not in COLUMNS]
    contexts = result.reference.outcomes[0].contexts
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = ["controller", "training_seed", "host", "host_seed", "member", *COLUMNS, "pool_seconds", *metrics]
        writer.writerow(names)
        for entry in result.entries:
            for seed, outcome in zip(entry.training_seeds, entry.outcomes, strict=True):
                for host, host_seed in enumerate(result.rng_seeds):
                    writer.writerow(
                        [
                            *(entry.name, "" if seed is None else seed, host, host_seed, contexts[host]),
                            *(f"{getattr(outcome, column)[host]:.9g}" for column in COLUMNS),
                            f"{outcome.seconds:.3f}",
                            *(f"{outcome.metrics[name][host]:.9g}".replace("nan", "") for name in metrics),
                        ]
                    )


def summary(result: ComparisonResult) -> dict[str, Any]:
    """Return the results of a comparison as means with intervals, over all hosts and by training seed."""
    controllers = {}
    for entry in result.entries:
        by_seed = zip(result.reference.training_seeds, result.lead(entry), strict=True)
        controllers[entry.name] = {
            **{column: mean_interval(entry.values(column))._asdict() for column in COLUMNS},
            "test_metrics": entry.mean_metrics(),
            "pool_seconds": [outcome.seconds for outcome in entry.outcomes],
            "ahead": result.mean_lead(entry)._asdict(),
            "ahead_by_training_seed": [{"training_seed": seed} | mean_interval(row)._asdict() for seed, row in by_seed],
        }
    return {
        "intervals": INTERVAL_METHOD,
        "ahead": f"objective of {result.reference.name} minus that of the controller, paired by host",
        "hosts": len(result.rng_seeds),
        "checkpoints": [{"training_seed": one.training_seed, "source": one.source} for one in result.policies],
        "controllers": controllers,
        "notes": result.notes,
    }
