"""Steps of the check on a GPU, and the report of their results."""

import csv
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

PREFIX = "RESULT\t"
"""Beginning of a line of output that is a result."""


class Step(NamedTuple):
    """A command whose outcome is reported."""

    title: str
    command: list[str]
    limit: int
    """Seconds after which the command is ended."""
    folder: Path | None = None
    """Run folder in which a closing comparison must be afterwards. None: there is none."""


class Result(NamedTuple):
    """A row of the report."""

    step: str
    quantity: str
    value: str
    unit: str = ""


def print_result(quantity: str, value: object, unit: str = "") -> None:
    """Print a result of the present step."""
    print(f"{PREFIX}{quantity}\t{value}\t{unit}", flush=True)


def parse_results(step: str, output: str) -> list[Result]:
    """Return the results in the output of a step."""
    lines = [line.removeprefix(PREFIX) for line in output.splitlines() if line.startswith(PREFIX)]
    return [Result(step, *line.split("\t")) for line in lines]


def write_report(results: Sequence[Result], out: Path) -> None:
    """Write `report.csv` and `report.md` into a folder."""
    with (out / "report.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Result._fields)
        writer.writerows(results)
    outcomes = [result for result in results if result.quantity == "outcome"]
    lines = ["# Check on a GPU", "", "| step | outcome |", "|---|---|"]
    lines += [f"| {result.step} | {result.value} |" for result in outcomes]
    for step, rows in groupby(results, key=lambda result: result.step):
        measured = [row for row in rows if row.quantity != "outcome"]
        if measured:
            lines += ["", f"## {step}", "", "| quantity | value | unit |", "|---|---|---|"]
            lines += [f"| {row.quantity} | {row.value} | {row.unit} |" for row in measured]
    (out / "report.md").write_text("\n".join(lines) + "\n")
