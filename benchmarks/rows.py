"""Results of benchmarks as rows of CSV files, which are appended as soon as they are measured."""

import csv
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row", bound=tuple[Any, ...])
"""A NamedTuple whose fields are of types that text is converted to: `str`, `int` and `float`."""


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Return the rows of a CSV file, empty if there is none."""
    if not path.exists():
        return []
    types = kind.__annotations__
    with path.open(newline="", encoding="utf-8") as file:
        return [kind(**{name: types[name](value) for name, value in row.items()}) for row in csv.DictReader(file)]


@contextmanager
def appended_rows(path: Path, kind: type[Row]) -> Iterator[Callable[[Iterable[Row]], None]]:
    """Open a CSV file, which is made with its heading if it is missing, and yield a function that appends rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not file.tell():
            writer.writerow(list(kind.__annotations__))
            file.flush()  # before another process opens the file

        def append(rows: Iterable[Row]) -> None:
            writer.writerows(list(rows))  # all rows are measured before the first one is written
            file.flush()

        yield append
