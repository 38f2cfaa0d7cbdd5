"""Value of information as terminal tables and as JSON files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper_lightning.evaluation.information import Best, Information
from esper_lightning.evaluation.publish import wide_console
from esper_lightning.evaluation.report import make_table, show, without_nan
from esper_lightning.growth.saving import replace_file
from esper_lightning.tamiyo.schedule import write_schedule


def print_information(found: Information) -> None:
    """Print the best schedule for each context, the value of information and the best common schedule."""
    worth = make_table(
        "value of information: objective above that of the best single schedule",
        "among the schedules that were played; chosen on half of the hosts, measured on the other half",
        ("who chooses knows", "gain, mean ± 95 % interval"),
    )
    for name, gain in found.facts.items():
        worth.add_row(name, show(gain, 3))
    worth.add_row("each host, with hindsight", f"{found.per_host:.3f}")
    members = make_table(
        "best schedule for each member",
        "objective on half of its hosts of the best schedule on the other half, for it or for all",
        ("member", "own", "for all", "the best on all of its hosts"),
    )
    members.columns[0].no_wrap = False  # context names can be long; the numbers must not be truncated for them
    for best in found.members:
        members.add_row(best.member, f"{best.objective:.3f}", f"{best.common:.3f}", seeds_of(best))
    console = wide_console()
    for part in (members, worth, f"best for all:\n{found.schedule}", f"{found.steps} environment steps were played"):
        console.print(part)


def seeds_of(best: Best) -> str:
    """Return a short text about the seeds that the schedule germinates."""
    entries = best.schedule.entries
    said = []
    for i, entry in enumerate(entries):
        if entry.op == "GERMINATE":
            later = next((e for e in entries[i + 1 :] if e.slot == entry.slot and e.op in ("CULL", "FOSSILIZE")), None)
            end = f", culled at {later.tick}" if later is not None and later.op == "CULL" else ""
            said.append(f"{entry.slot} {entry.blueprint} at {entry.tick}{end}")
    return "\n".join(said) or "nothing"


def write_information(found: Information, folder: Path, record: Mapping[str, Any]) -> None:
    """Write `information.json` with all results, and `best_schedule.json`, which `evaluate` can play."""
    summary = {
        "gains": {name: gain._asdict() for name, gain in found.facts.items()},
        "with_hindsight": found.per_host,
        "members": [
            {"member": best.member, "schedule": str(best.schedule), "own": best.objective, "common": best.common}
            for best in found.members
        ],
        "steps": found.steps,
        **record,
    }
    text = json.dumps(without_nan(summary), indent=1, allow_nan=False) + "\n"
    replace_file(folder / "information.json", lambda path: path.write_text(text))
    write_schedule(found.schedule, folder / "best_schedule.json")
