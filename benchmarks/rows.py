"""Results of benchmarks as rows of CSV files, which are appended as soon as they are measured."""

import csv
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row", bound=tuple[Any, ...])
"""A NamedTuple whose fields are of types that text is converted to: `str`, `int` and `float`."""

ORIGIN = ("revision", "date")
"""Columns that each appended row gets."""

DIRTY = "-dirty"
"""End of a revision whose code had changes that were not committed."""

UNKNOWN = "unknown"
"""Revision of rows whose code is in no repository, or whose origin is lost."""


@cache
def revision() -> str:
    """Return the commit of the code, marked if files other than results have changed since; UNKNOWN without git."""
    folder = Path(__file__).parent
    head = ["git", "rev-parse", "--short=8", "HEAD"]
    found = subprocess.run(head, cwd=folder, capture_output=True, text=True)
    if found.returncode:
        return UNKNOWN
    changes = ["git", "diff", "--quiet", "HEAD", "--", ":/", ":(exclude)results"]
    return found.stdout.strip() + DIRTY * bool(subprocess.run(changes, cwd=folder).returncode)


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Return the rows of a CSV file, empty if there is none."""
    if not path.exists():
        return []
    types = kind.__annotations__
    with path.open(newline="", encoding="utf-8") as file:
        return [kind(**{name: types[name](row[name]) for name in types}) for row in csv.DictReader(file)]


@contextmanager
def appended_rows(path: Path, kind: type[Row]) -> Iterator[Callable[[Iterable[Row]], None]]:
    """Open a CSV file, which is made with its heading if it is missing, and yield a function that appends rows.

    Each row gets the revision of the code and the date. Rows of a file without these columns keep them empty.
    """
    code = revision()  # that of the modules which are loaded
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = list(kind.__annotations__)
    added = [name for name in ORIGIN if name not in fields]
    if added and path.exists():
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        if head == ",".join(fields):
            lines = [",".join([*fields, *added]), *(line + "," * len(added) for line in lines)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not file.tell():
            writer.writerow([*fields, *added])
            file.flush()  # before another process opens the file

        def append(rows: Iterable[Row]) -> None:
            origin = {"revision": code, "date": date.today().isoformat()}
            # All rows are measured before the first one is written.
            writer.writerows([[*row, *(origin[name] for name in added)] for row in rows])
            file.flush()

        yield append
