"""Comparison results as terminal tables and as CSV and JSON files. S training seeds, H hosts."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from esper_lightning.evaluation import intervals
from esper_lightning.evaluation.comparison import REPLAYED, YOKED, Contender, Contest
from esper_lightning.evaluation.intervals import Interval, effect_size, mean_interval
from esper_lightning.growth.saving import replace_file
from esper_lightning.tamiyo.schedule import write_schedule

COLUMNS = ("accuracy", "loss", "parameters", "objective", "flops", "ticks", "fossils", "rollbacks")
"""Columns of an outcome, with one number per host."""

INTERVALS = (
    f"{100 * intervals.CONFIDENCE:g} % percentile bootstrap, {intervals.RESAMPLES} resamples, seed {intervals.SEED}: "
    f"of hosts, and where there are several training seeds of training seeds and of hosts"
)


def show(interval: Interval, digits: int) -> str:
    """Return `0.573 ± 0.017`, with half the width of the interval; the files contain its ends."""
    return f"{interval.mean:.{digits}f} ± {(interval.high - interval.low) / 2:.{digits}f}"


def show_effect(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def tables(contest: Contest) -> list[Table]:
    """Return the tables of results and costs and, with several training seeds, the lead of each policy."""
    made = [results(contest), costs(contest)]
    return [*made, per_training_seed(contest)] if len(contest.tamiyos) > 1 else made


def make_table(title: str, caption: str, headings: Sequence[str]) -> Table:
    """Return an empty table whose first column holds names and the others numbers."""
    made = Table(title=title, caption=caption)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return made


def results(contest: Contest) -> Table:
    """Return a table of results with one row per entry.

    Leads are the policy's objective minus the row's, paired by host.
    """
    ours, several = contest.ours.name, len(contest.tamiyos) > 1
    result = make_table(
        f"{len(contest.seeds)} fresh hosts, test images, mean ± 95 % interval",
        f"{ours} ahead: objective of {ours} minus this row's, paired by host"
        + (f"; mean over {len(contest.tamiyos)} training seeds" if several else ""),
        ("controller", "test accuracy", "objective", f"{ours} ahead", "d_z"),
    )
    for contender in contest.contenders:
        lead, effect = contest.ahead(contender)
        ahead = ("", "") if contender is contest.ours else (show(lead, 3), show_effect(effect))
        accuracy, worth = (mean_interval(contender.values(column)) for column in ("accuracy", "objective"))
        result.add_row(contender.name, show(accuracy, 3), show(worth, 3), *ahead)
    return result


def costs(contest: Contest) -> Table:
    """Return a table of costs with one row per entry: means over hosts and training seeds."""
    result = make_table(
        "costs, mean per host",
        "loss: on test images; MFLOP of training; epochs: host epochs; seconds: all hosts' whole episode",
        ("controller", "loss", "parameters", "MFLOP", "epochs", "fossils", "rollbacks", "seconds"),
    )
    for contender in contest.contenders:
        loss, parameters, flops, ticks, fossils, rollbacks = (
            float(contender.values(column).mean())
            for column in ("loss", "parameters", "flops", "ticks", "fossils", "rollbacks")
        )
        numbers = (f"{loss:.3f}", f"{parameters:.0f}", f"{flops / 1e6:.3g}", f"{ticks:.1f}", f"{fossils:.2f}")
        result.add_row(contender.name, *numbers, f"{rollbacks:.2f}", f"{contender.values('seconds').mean():.1f}")
    return result


def per_training_seed(contest: Contest) -> Table:
    """Return a table with the lead of each policy, and of all together, over each other entry."""
    names = [label(contest, number) for number in range(len(contest.tamiyos))]
    result = make_table(
        f"{contest.ours.name} ahead, by training seed: objective, mean ± 95 % interval over hosts",
        "all: interval over training seeds and hosts",
        ("controller", *names, "all"),
    )
    for contender in contest.contenders[1:]:
        leads = contest.lead(contender)
        result.add_row(contender.name, *(show(mean_interval(lead), 3) for lead in leads), show(mean_interval(leads), 3))
    return result


def label(contest: Contest, number: int) -> str:
    """Return a label of the training seed or checkpoint of a policy."""
    seed = contest.tamiyos[number].training_seed
    return f"seed {seed}" if seed is not None else f"checkpoint {number + 1}"


def write(contest: Contest, folder: Path, record: Mapping[str, Any]) -> None:
    """Write all files of a comparison.

    `evaluation.csv` has one row per host and controller, `evaluation.json` the summary; every found schedule has its
    own file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "evaluation.csv", host_rows(contest))
    text = json.dumps(without_nan(summary(contest, record)), indent=1, allow_nan=False) + "\n"
    replace_file(folder / "evaluation.json", lambda path: path.write_text(text))
    for name, schedule in contest.schedules.items():
        write_schedule(schedule, folder / f"{name}.json")


def host_rows(contest: Contest) -> list[list[str]]:
    """Return rows in long format: one per host and controller, and per training seed if the controller has one."""
    rows = [["controller", "training_seed", "host", "host_seed", "member", *COLUMNS, "pool_seconds"]]
    members = contest.ours.outcomes[0].members
    for contender in contest.contenders:
        trained = is_trained(contest, contender)
        for number, outcome in enumerate(contender.outcomes):
            seed = contest.tamiyos[number].training_seed if trained else None
            who = [contender.name, "" if seed is None else str(seed)]
            for host, host_seed in enumerate(contest.seeds):
                numbers = [f"{getattr(outcome, column)[host]:.9g}" for column in COLUMNS]
                rows.append([*who, str(host), str(host_seed), members[host], *numbers, f"{outcome.seconds:.3f}"])
    return rows


def is_trained(contest: Contest, contender: Contender) -> bool:
    """Return True if the entry depends on a checkpoint."""
    names = (contest.ours.name, "sampled", REPLAYED, YOKED)
    return contender.name in names or contender.name.startswith(f"static {contest.ours.name}")


def summary(contest: Contest, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `evaluation.json`; NaN and infinity become null when it is written."""
    controllers = {}
    for contender in contest.contenders:
        lead, effect = contest.ahead(contender)
        rows = zip(contest.tamiyos, contest.lead(contender), strict=True)
        controllers[contender.name] = {
            **{column: mean_interval(contender.values(column))._asdict() for column in COLUMNS},
            "pool_seconds": [outcome.seconds for outcome in contender.outcomes],
            "ahead": lead._asdict() | {"d_z": effect},
            "ahead_by_training_seed": [
                {"training_seed": one.training_seed} | mean_interval(row)._asdict() | {"d_z": effect_size(row)}
                for one, row in rows
            ],
        }
    return {
        "intervals": INTERVALS,
        "ahead": f"objective of {contest.ours.name} minus that of the controller, paired by host",
        "d_z": "mean over standard deviation of the paired differences over hosts",
        "hosts": len(contest.seeds),
        "checkpoints": [{"training_seed": one.training_seed, "source": one.source} for one in contest.tamiyos],
        "controllers": controllers,
        "notes": contest.notes,
        **record,
    }


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_rows(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write a CSV file, replacing an existing one."""

    def write_draft(draft: Path) -> None:
        with draft.open("w", newline="") as file:
            csv.writer(file).writerows(rows)

    replace_file(path, write_draft)
