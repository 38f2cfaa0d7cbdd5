"""Output of a comparison: tables on the terminal, files and figures in a folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from esper_lightning.data import HostPoolData, say
from esper_lightning.evaluation.comparison import Comparison, Contest
from esper_lightning.evaluation.credit_report import seed_table, write_seeds
from esper_lightning.evaluation.figures import draw
from esper_lightning.evaluation.learned import Tamiyo
from esper_lightning.evaluation.report import tables, write

WIDTH = 110
"""Minimum width of the tables in columns; a narrower terminal wraps their lines, a file has room."""


def wide_console() -> Console:
    """Return a console wide enough to print tables without cutting them."""
    console = Console()
    console.width = max(console.width, WIDTH)
    return console


def compare(
    comparison: Comparison, data: HostPoolData, tamiyos: Sequence[Tamiyo], folder: Path, record: Mapping[str, Any]
) -> None:
    """Run the comparison on hosts of each task and publish the results, with several tasks in one folder per task.

    Args:
        comparison: Settings of the comparison.
        data: Hosts; the pool must be built and is not modified.
        policies: Trained policies, one per training seed.
        folder: Output folder.
        record: Description of this process, saved in `evaluation.json`.
    """
    for task, pool in data.pools.items():
        several = len(data.pools) > 1
        if several:
            say(f"hosts of {task}")
        contest = comparison.play(data, tamiyos, task)
        publish(comparison, contest, pool.space.slot, folder / task if several else folder, record)


def publish(
    comparison: Comparison, contest: Contest, slots: list[str], folder: Path, record: Mapping[str, Any]
) -> None:
    """Write all files and print all tables.

    Args:
        comparison: Settings of the comparison.
        result: Result of the comparison.
        slots: Names of the hosts' slots.
        folder: Output folder; results of an earlier comparison are replaced.
        record: Description of this process, saved in `evaluation.json`.
    """
    write(contest, folder, record)
    figures = draw(contest, slots, folder)
    console = wide_console()
    for note in contest.notes:
        console.print(note, soft_wrap=True)
    for table in tables(contest):
        console.print(table)
    if comparison.credit.hosts:
        write_seeds(contest.credits, folder)
        none = "tamiyo fossilized no seed on the analysed hosts"
        console.print(seed_table(contest.credits, comparison.credit) if contest.credits else none)
    names = ", ".join(["evaluation.csv", "evaluation.json", *(path.name for path in figures)])
    console.print(f"written to {folder}: {names}", soft_wrap=True)
