"""Counting and printing of detected faults."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

DETECTION_TICKS = 3
"""Number of ticks within which a fault should be detected."""


class DetectionCount(NamedTuple):
    """Counts of a fault: detected in time, and injected."""

    found: int
    injected: int

    def __str__(self) -> str:
        return f"{self.found:,} of {self.injected:,} ({self.found / self.injected:.1%})" if self.injected else "–"

    def add(self, found: bool) -> "DetectionCount":
        return DetectionCount(self.found + found, self.injected + 1)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], markdown: bool) -> None:
    """Print a table, in Markdown on request."""
    cells = [[str(cell) for cell in row] for row in rows]
    if markdown:
        lines = [columns, ["---"] * len(columns), *cells]
        print(f"\n{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
        return
    table = Table(*columns, title=title)
    for row in cells:
        table.add_row(*row)
    Console(width=140).print(table)
