"""Value of information as terminal tables and as JSON files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper_lightning.console import wide_console
from esper_lightning.controllers.schedule import write_schedule
from esper_lightning.evaluation.report import format_interval, make_table, write_json
from esper_lightning.evaluation.search.value_of_information import BestPlan, InformationValue


def print_information(value: InformationValue) -> None:
    """Print the best schedule for each context, the value of information and the best common schedule."""
    gain_table = make_table(
        "value of information: objective above that of the best single schedule",
        "among the schedules that were played; chosen on half of the hosts, measured on the other half",
        ("known variables", "gain, mean ± 95 % interval"),
    )
    for name, gain in value.gains.items():
        gain_table.add_row(name, format_interval(gain, 3))
    gain_table.add_row("each host, with hindsight", f"{value.hindsight_gain:.3f}")
    context_table = make_table(
        "best schedule for each context",
        "objective on half of its hosts of the best schedule on the other half, for it or for all",
        ("context", "own", "for all", "the best on all of its hosts"),
    )
    context_table.columns[0].no_wrap = False  # context names can be long; the numbers must not be truncated for them
    for best in value.contexts:
        context_table.add_row(
            best.context, f"{best.objective:.3f}", f"{best.common_objective:.3f}", describe_seeds(best)
        )
    console = wide_console()
    for part in (
        context_table,
        gain_table,
        f"best for all:\n{value.common_schedule}",
        f"{value.steps} environment steps were played",
    ):
        console.print(part)


def describe_seeds(best: BestPlan) -> str:
    """Return a short text about the seeds that the schedule germinates."""
    entries = best.schedule.entries
    lines = []
    for i, entry in enumerate(entries):
        if entry.op == "GERMINATE":
            removal = next(
                (e for e in entries[i + 1 :] if e.slot == entry.slot and e.op in ("CULL", "FOSSILIZE")), None
            )
            end = f", culled at {removal.tick}" if removal is not None and removal.op == "CULL" else ""
            lines.append(f"{entry.slot} {entry.blueprint} at {entry.tick}{end}")
    return "\n".join(lines) or "nothing"


def write_information(value: InformationValue, folder: Path, record: Mapping[str, Any]) -> None:
    """Write `information.json` with all results, and `best_schedule.json`, which `evaluate` can play."""
    summary = {
        "gains": {name: gain._asdict() for name, gain in value.gains.items()},
        "with_hindsight": value.hindsight_gain,
        "contexts": [
            {
                "member": best.context,
                "schedule": str(best.schedule),
                "own": best.objective,
                "common": best.common_objective,
            }
            for best in value.contexts
        ],
        "steps": value.steps,
        **record,
    }
    write_json(folder / "information.json", summary)
    write_schedule(value.common_schedule, folder / "best_schedule.json")
