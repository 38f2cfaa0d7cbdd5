"""Results of a comparison, as terminal tables and as CSV and JSON files."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from esper_lightning.controllers.schedules import write_schedule
from esper_lightning.evaluation import statistics
from esper_lightning.evaluation.comparison import ComparisonResult
from esper_lightning.evaluation.play import Outcome
from esper_lightning.evaluation.statistics import Interval, effect_size, mean_interval
from esper_lightning.serialization import replace_file
from esper_lightning.telemetry.events import replace_non_finite

COLUMNS = ("accuracy", "loss", "parameters", "objective", "flops", "ticks", "fossils", "rollbacks")
"""Columns of an outcome, with one number per host."""

RESULTS_FILE, METRICS_FILE, SUMMARY_FILE = "evaluation.csv", "test_metrics.csv", "evaluation.json"
"""Files with one row per host and controller, of the results and of further test metrics; and of all means."""

INTERVAL_METHOD = (
    f"{100 * statistics.CONFIDENCE:g} % percentile bootstrap, {statistics.RESAMPLES} resamples, "
    f"seed {statistics.RNG_SEED}: of hosts, and where there are several training seeds of training seeds and of hosts"
)


def format_interval(interval: Interval) -> str:
    """Return `0.573 ± 0.017`, with half the width of the interval; the files contain its ends."""
    return f"{interval.mean:.3f} ± {(interval.high - interval.low) / 2:.3f}"


def make_table(title: str, caption: str, headings: Sequence[str], rows: Iterator[Sequence[str]]) -> Table:
    """Return a table whose first column holds names and the others numbers."""
    table = Table(title=title, caption=caption)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def make_tables(result: ComparisonResult) -> list[Table]:
    """Return the tables of results, costs and test metrics; with several training seeds also each policy's lead."""
    tables = [results_table(result), costs_table(result), metrics_table(result)]
    return [*tables, training_seed_table(result)] if len(result.policies) > 1 else tables


def results_table(result: ComparisonResult) -> Table:
    """Return a table of results. Leads are the objective of the first row minus the row's, paired by host."""
    reference = result.reference.name

    def rows() -> Iterator[Sequence[str]]:
        for entry in result.entries:
            lead, effect = result.mean_lead(entry)
            ahead = (format_interval(lead), f"{effect:.2f}".replace("nan", ""))
            means = (format_interval(mean_interval(entry.values(column))) for column in ("accuracy", "objective"))
            yield entry.name, *means, *(("", "") if entry is result.reference else ahead)

    return make_table(
        f"{len(result.rng_seeds)} fresh hosts, test images, mean ± 95 % interval",
        f"{reference} ahead: objective of {reference} minus this row's, paired by host"
        + (f"; mean over {len(result.policies)} training seeds" if len(result.policies) > 1 else ""),
        ("controller", "test accuracy", "objective", f"{reference} ahead", "d_z"),
        rows(),
    )


def costs_table(result: ComparisonResult) -> Table:
    """Return a table of costs: means over hosts and training seeds."""
    columns = {
        "loss": "{loss:.3f}", "parameters": "{parameters:.0f}", "MFLOP": "{flops:.3g}", "epochs": "{ticks:.1f}",
        "fossils": "{fossils:.2f}", "rollbacks": "{rollbacks:.2f}", "seconds": "{seconds:.1f}",
    }  # fmt: skip

    def rows() -> Iterator[Sequence[str]]:
        for entry in result.entries:
            means = {column: float(entry.values(column).mean()) for column in (*COLUMNS, "seconds")}
            means["flops"] /= 1e6
            yield entry.name, *(form.format(**means) for form in columns.values())

    return make_table(
        "costs, mean per host",
        "loss: on test images; MFLOP of training; epochs: host epochs; seconds: all hosts' whole episode",
        ("controller", *columns),
        rows(),
    )


def metrics_table(result: ComparisonResult) -> Table:
    """Return a table of the task's further test metrics: means over hosts and training seeds.

    Of metrics that exist for each class, such as `accuracy.<class>`, it shows the lowest mean and its class.
    """
    names = list(result.reference.mean_metrics())
    single = [name for name in names if "." not in name]
    grouped = list(dict.fromkeys(name.partition(".")[0] for name in names if "." in name))

    def rows() -> Iterator[Sequence[str]]:
        for entry in result.entries:
            means = entry.mean_metrics()
            row = [entry.name, *(f"{means[name]:.3f}" for name in single)]
            for group in grouped:
                name = min((name for name in means if name.startswith(f"{group}.")), key=means.__getitem__)
                row.append(f"{means[name]:.3f} ({name.partition('.')[2]})")
            yield row

    return make_table(
        "further test metrics, mean over hosts",
        "lowest: the class with the lowest mean, its number in brackets" if grouped else "",
        ("controller", *(name.replace("_", " ") for name in single), *(f"lowest {name}" for name in grouped)),
        rows(),
    )


def training_seed_table(result: ComparisonResult) -> Table:
    """Return a table of the policy's lead over every other row: one column per training seed, and one pooled."""

    def rows() -> Iterator[Sequence[str]]:
        for entry in result.entries[1:]:  # entry 0 is the policy itself
            leads = result.lead(entry)  # [S, H]: training seeds, hosts
            yield entry.name, *(format_interval(mean_interval(lead)) for lead in (*leads, leads))

    return make_table(
        f"{result.reference.name} ahead, by training seed: objective, mean ± 95 % interval over hosts",
        "all: interval over training seeds and hosts",
        ("controller", *result.policy_labels(), "all"),
        rows(),
    )


def write_report(result: ComparisonResult, folder: Path, record: Mapping[str, Any]) -> None:
    """Write the tables of all hosts as CSV files, the summary as JSON, and every found schedule in its own file."""
    folder.mkdir(parents=True, exist_ok=True)
    contexts, hosts = result.reference.outcomes[0].contexts, list(enumerate(result.rng_seeds))
    write_csv(
        folder / RESULTS_FILE,
        ["controller", "training_seed", "host", "host_seed", "member", *COLUMNS, "pool_seconds"],
        (
            [
                *(*names, host, host_seed, contexts[host]),
                *(f"{getattr(outcome, column)[host]:.9g}" for column in COLUMNS),
                f"{outcome.seconds:.3f}",
            ]
            for names, outcome in identified_outcomes(result)
            for host, host_seed in hosts
        ),
    )
    metrics = list(result.reference.mean_metrics())
    write_csv(
        folder / METRICS_FILE,
        ["controller", "training_seed", "host", *metrics],
        (
            [*names, host, *(f"{outcome.metrics[name][host]:.9g}".replace("nan", "") for name in metrics)]
            for names, outcome in identified_outcomes(result)
            for host, _ in hosts
        ),
    )
    # NaN and infinity, which JSON lacks, become null.
    text = json.dumps(replace_non_finite({**summary(result), **record}), indent=1, allow_nan=False) + "\n"
    replace_file(folder / SUMMARY_FILE, lambda draft: draft.write_text(text))
    for name, schedule in result.schedules.items():
        write_schedule(schedule, folder / f"{name}.json")


def identified_outcomes(result: ComparisonResult) -> Iterator[tuple[list[str], Outcome]]:
    """Yield every outcome, with the name of its entry and its training seed (empty for one without training)."""
    for entry in result.entries:
        for seed, outcome in zip(entry.training_seeds, entry.outcomes, strict=True):
            yield [entry.name, "" if seed is None else str(seed)], outcome


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file, replacing an existing one."""

    def write_draft(draft: Path) -> None:
        with draft.open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])

    replace_file(path, write_draft)


def summary(result: ComparisonResult) -> dict[str, Any]:
    """Return the results of a comparison as means with intervals, over all hosts and by training seed."""
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
    sources = {name: {"training_seed": p.training_seed, "source": p.source} for name, p in result.rivals.items()}
    return {
        "intervals": INTERVAL_METHOD,
        "ahead": f"objective of {result.reference.name} minus that of the controller, paired by host",
        "d_z": "mean over standard deviation of the paired differences over hosts",
        "hosts": len(result.rng_seeds),
        "checkpoints": [{"training_seed": p.training_seed, "source": p.source} for p in result.policies],
        "rivals": sources,
        "controllers": controllers,
        "notes": result.notes,
    }
