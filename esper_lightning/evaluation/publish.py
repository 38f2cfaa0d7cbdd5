"""Where a comparison ends: tables on the terminal, files and figures in a folder."""

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
"""Columns that the tables need; a terminal that is narrower breaks their lines, and a file has room."""


def wide_console() -> Console:
    """Prints tables whole."""
    console = Console()
    console.width = max(console.width, WIDTH)
    return console


def compare(
    comparison: Comparison, data: HostPoolData, tamiyos: Sequence[Tamiyo], folder: Path, record: Mapping[str, Any]
) -> None:
    """Plays everyone on hosts of each task, and publishes what comes of it: of several tasks in folders of their names.

    Args:
        comparison: What is asked for.
        data: Its pool is built, and is not touched.
        tamiyos: Of one training seed, or of several.
        folder: For the files.
        record: How this process runs.
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
    """Writes and prints everything.

    Args:
        comparison: What was asked for.
        contest: What came of it.
        slots: Of the hosts.
        folder: For the files; what an earlier comparison left there is replaced.
        record: How this process runs, for `evaluation.json`.
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
        none = "tamiyo kept no seed on the hosts looked at"
        console.print(seed_table(contest.credits, comparison.credit) if contest.credits else none)
    names = ", ".join(["evaluation.csv", "evaluation.json", *(path.name for path in figures)])
    console.print(f"written to {folder}: {names}", soft_wrap=True)
