"""List the tables whose code has changed since their rows were made.

    python -m benchmarks.stale    # ends with 1 if there are any

`benchmarks/results/provenance.yaml` says of each CSV file which pages show it, which files of the code make it, and by
which command, at which commit and on which day its rows were made. Rows with columns of their own for commit and day
need no more. A table is stale if a commit after one of these has changed one of the files, unless `still_valid` says
of this commit why it does not matter. Commits count, not what has not been committed yet.
"""

import csv
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from benchmarks.rows import DIRTY

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
UNKNOWN = "unknown"
"""Revision of rows whose origin is lost."""


class Table(NamedTuple):
    """Results that one program has made."""

    files: list[str]
    """Names of CSV files in `benchmarks/results`; those of contexts beside them belong to them."""
    pages: list[str]
    """Paths of the pages that show them."""
    code: list[str]
    """Git's patterns of the files that make them."""
    command: str
    revisions: list[str]
    """Commits of the code, the newest last."""
    still_valid: dict[str, str]
    """Commits after these that do not matter, with the reason."""


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def read_tables() -> list[Table]:
    """Return what `provenance.yaml` says, with the revisions that rows name themselves."""
    tables = []
    for names, entry in yaml.safe_load((RESULTS / "provenance.yaml").read_text(encoding="utf-8"))["tables"].items():
        revisions = [part["revision"] if "revision" in part else part["stored"] for part in entry.get("made", ())]
        for name in names.split():
            with (RESULTS / name).open(newline="", encoding="utf-8") as file:
                revisions += dict.fromkeys(row["revision"] for row in csv.DictReader(file) if row.get("revision"))
        code = " ".join(entry["code"]).split()
        valid = entry.get("still_valid", {})
        tables.append(Table(names.split(), entry["pages"], code, entry["command"], revisions or [UNKNOWN], valid))
    return tables


def commits_after(revision: str, code: Sequence[str]) -> list[str]:
    """Return the commits that changed files of the code, the oldest first."""
    return git("log", "--no-merges", "--reverse", "--format=%H", f"{revision}..HEAD", "--", *code).split()


def reasons(table: Table) -> Iterator[str]:
    """Yield a line for each revision for which the table is stale."""
    for revision in table.revisions:
        if revision == UNKNOWN:
            yield "revision unknown"
        elif revision.endswith(DIRTY):
            yield f"{revision}: the code had changes that are in no commit"
        else:
            commits = commits_after(revision, table.code)
            changes = [one for one in commits if not any(one.startswith(valid) for valid in table.still_valid)]
            if changes:
                (first, *_) = git("show", "--format=", "--name-only", changes[0], "--", *table.code).split()
                yield f"{revision}: {len(changes)} later commits, the first {changes[0][:8]} in {first}"


def main() -> None:
    stale = [(table, lines) for table in read_tables() if (lines := list(reasons(table)))]
    for table, lines in stale:
        print(f"{', '.join(table.files)} ({', '.join(table.pages)})", *lines, f"by {table.command}", sep="\n    ")
    sys.exit(bool(stale))


if __name__ == "__main__":
    main()
