"""Results of a comparison, as terminal tables and as CSV and JSON files."""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from esper_lightning.controllers.schedule import write_schedule
from esper_lightning.evaluation import statistics
from esper_lightning.evaluation.checkpoints import TrainedPolicy
from esper_lightning.evaluation.comparison import ComparisonResult
from esper_lightning.evaluation.play import Outcome
from esper_lightning.evaluation.statistics import Interval, effect_size, mean_interval
from esper_lightning.serialization.replace import replace_file
from esper_lightning.telemetry.events import replace_non_finite

COLUMNS = ("accuracy", "loss", "parameters", "objective", "flops", "ticks", "fossils", "rollbacks")
"""Columns of an outcome, with one number per host."""

RESULTS_FILE = "evaluation.csv"
"""File with one row per host and controller."""

INTERVAL_METHOD = (
    f"{100 * statistics.CONFIDENCE:g} % percentile bootstrap, {statistics.RESAMPLES} resamples, "
    f"seed {statistics.RNG_SEED}: of hosts, and where there are several training seeds of training seeds and of hosts"
)


def format_interval(interval: Interval, digits: int) -> str:
    """Return `0.573 ± 0.017`, with half the width of the interval; the files contain its ends."""
    return f"{interval.mean:.{digits}f} ± {(interval.high - interval.low) / 2:.{digits}f}"


def format_effect(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def make_tables(result: ComparisonResult) -> list[Table]:
    """Return the tables of results, costs and test metrics; with several training seeds also each policy's lead."""
    tables = [results_table(result), costs_table(result), metrics_table(result)]
    return [*tables, training_seed_table(result)] if len(result.policies) > 1 else tables


def make_table(title: str, caption: str, headings: Sequence[str]) -> Table:
    """Return an empty table whose first column holds names and the others numbers."""
    table = Table(title=title, caption=caption)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def results_table(result: ComparisonResult) -> Table:
    """Return a table of results with one row per entry.

    Leads are the objective of the first row minus the row's, paired by host.
    """
    reference = result.reference.name
    table = make_table(
        f"{len(result.rng_seeds)} fresh hosts, test images, mean ± 95 % interval",
        f"{reference} ahead: objective of {reference} minus this row's, paired by host"
        + (f"; mean over {len(result.policies)} training seeds" if len(result.policies) > 1 else ""),
        ("controller", "test accuracy", "objective", f"{reference} ahead", "d_z"),
    )
    for entry in result.entries:
        lead, effect = result.mean_lead(entry)
        ahead = ("", "") if entry is result.reference else (format_interval(lead, 3), format_effect(effect))
        accuracy, objective = (mean_interval(entry.values(column)) for column in ("accuracy", "objective"))
        table.add_row(entry.name, format_interval(accuracy, 3), format_interval(objective, 3), *ahead)
    return table


def costs_table(result: ComparisonResult) -> Table:
    """Return a table of costs with one row per entry: means over hosts and training seeds."""
    table = make_table(
        "costs, mean per host",
        "loss: on test images; MFLOP of training; epochs: host epochs; seconds: all hosts' whole episode",
        ("controller", "loss", "parameters", "MFLOP", "epochs", "fossils", "rollbacks", "seconds"),
    )
    for entry in result.entries:
        loss, parameters, flops, ticks, fossils, rollbacks = (
            float(entry.values(column).mean())
            for column in ("loss", "parameters", "flops", "ticks", "fossils", "rollbacks")
        )
        numbers = (f"{loss:.3f}", f"{parameters:.0f}", f"{flops / 1e6:.3g}", f"{ticks:.1f}", f"{fossils:.2f}")
        table.add_row(entry.name, *numbers, f"{rollbacks:.2f}", f"{entry.values('seconds').mean():.1f}")
    return table


def metrics_table(result: ComparisonResult) -> Table:
    """Return a table of the task's further test metrics with one row per entry: means over hosts and training seeds.

    Of metrics that exist for each class, such as `accuracy.<class>`, it shows the lowest mean and its class.
    """
    names = list(result.reference.mean_metrics())
    single = [name for name in names if "." not in name]
    grouped = list(dict.fromkeys(name.partition(".")[0] for name in names if "." in name))
    table = make_table(
        "further test metrics, mean over hosts",
        "lowest: the class with the lowest mean, its number in brackets" if grouped else "",
        ("controller", *(name.replace("_", " ") for name in single), *(f"lowest {name}" for name in grouped)),
    )
    for entry in result.entries:
        means = entry.mean_metrics()
        lowest = [
            min((mean, name.partition(".")[2]) for name, mean in means.items() if name.startswith(f"{group}."))
            for group in grouped
        ]
        table.add_row(
            entry.name,
            *(f"{means[name]:.3f}" for name in single),
            *(f"{mean:.3f} ({label})" for mean, label in lowest),
        )
    return table


def training_seed_table(result: ComparisonResult) -> Table:
    """Return a table of the policy's lead over every baseline: one column per training seed, and one pooled."""
    names = [policy_label(result, number) for number in range(len(result.policies))]
    table = make_table(
        f"{result.reference.name} ahead, by training seed: objective, mean ± 95 % interval over hosts",
        "all: interval over training seeds and hosts",
        ("controller", *names, "all"),
    )
    for entry in result.entries[1:]:  # entry 0 is the policy itself
        leads = result.lead(entry)  # [S, H]: training seeds, hosts
        table.add_row(
            entry.name,
            *(format_interval(mean_interval(lead), 3) for lead in leads),
            format_interval(mean_interval(leads), 3),
        )
    return table


def policy_label(result: ComparisonResult, number: int) -> str:
    """Return a label of the training seed or checkpoint of a policy."""
    seed = result.policies[number].training_seed
    return f"seed {seed}" if seed is not None else f"checkpoint {number + 1}"


def write_report(result: ComparisonResult, folder: Path, record: Mapping[str, Any]) -> None:
    """Write all files of a comparison.

    `evaluation.csv` and `test_metrics.csv` have one row per host and controller, `evaluation.json` the summary; every
    found schedule has its own file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / RESULTS_FILE, host_rows(result))
    write_csv(folder / "test_metrics.csv", metric_rows(result))
    write_json(folder / "evaluation.json", summary(result, record))
    for name, schedule in result.schedules.items():
        write_schedule(schedule, folder / f"{name}.json")


def host_rows(result: ComparisonResult) -> list[list[str]]:
    """Return rows in long format: one per host and controller, and per training seed if the controller has one."""
    rows = [["controller", "training_seed", "host", "host_seed", "member", *COLUMNS, "pool_seconds"]]
    contexts = result.reference.outcomes[0].contexts
    for identifiers, outcome in identified_outcomes(result):
        for host, host_seed in enumerate(result.rng_seeds):
            numbers = [f"{getattr(outcome, column)[host]:.9g}" for column in COLUMNS]
            rows.append([*identifiers, str(host), str(host_seed), contexts[host], *numbers, f"{outcome.seconds:.3f}"])
    return rows


def metric_rows(result: ComparisonResult) -> list[list[str]]:
    """Return rows like those of `host_rows`, with the task's further test metrics; empty cells where undefined."""
    names = list(result.reference.mean_metrics())
    rows = [["controller", "training_seed", "host", *names]]
    for identifiers, outcome in identified_outcomes(result):
        for host in range(len(result.rng_seeds)):
            numbers = [outcome.metrics[name][host] for name in names]
            rows.append(
                [*identifiers, str(host), *("" if math.isnan(number) else f"{number:.9g}" for number in numbers)]
            )
    return rows


def identified_outcomes(result: ComparisonResult) -> Iterator[tuple[list[str], Outcome]]:
    """Yield every outcome, with the name of its entry and its training seed (empty for one without training)."""
    for entry in result.entries:
        for seed, outcome in zip(entry.training_seeds, entry.outcomes, strict=True):
            yield [entry.name, "" if seed is None else str(seed)], outcome


def summary(result: ComparisonResult, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `evaluation.json`; NaN and infinity become null when it is written."""
    controllers = {}
    for entry in result.entries:
        lead, effect = result.mean_lead(entry)
        rows = zip(result.reference.training_seeds, result.lead(entry), strict=True)
        controllers[entry.name] = {
            **{column: mean_interval(entry.values(column))._asdict() for column in COLUMNS},
            "test_metrics": entry.mean_metrics(),
            "pool_seconds": [outcome.seconds for outcome in entry.outcomes],
            "ahead": lead._asdict() | {"d_z": effect},
            "ahead_by_training_seed": [
                {"training_seed": seed} | mean_interval(row)._asdict() | {"d_z": effect_size(row)} for seed, row in rows
            ],
        }
    return {
        "intervals": INTERVAL_METHOD,
        "ahead": f"objective of {result.reference.name} minus that of the controller, paired by host",
        "d_z": "mean over standard deviation of the paired differences over hosts",
        "hosts": len(result.rng_seeds),
        "checkpoints": [describe_policy(policy) for policy in result.policies],
        "rivals": {name: describe_policy(policy) for name, policy in result.rivals.items()},
        "controllers": controllers,
        "notes": result.notes,
        **record,
    }


def describe_policy(policy: TrainedPolicy) -> dict[str, Any]:
    """Return the training seed and the source of a policy."""
    return {"training_seed": policy.training_seed, "source": policy.source}


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file, replacing an existing one; NaN and infinity, which JSON lacks, become null."""
    text = json.dumps(replace_non_finite(document), indent=1, allow_nan=False) + "\n"
    replace_file(path, lambda draft: draft.write_text(text))


def write_csv(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write a CSV file, replacing an existing one."""

    def write_draft(draft: Path) -> None:
        with draft.open("w", newline="") as file:
            csv.writer(file).writerows(rows)

    replace_file(path, write_draft)
