"""List the tables whose code has changed since their rows were made.

    python -m benchmarks.stale    # ends with 1 if there are any

`benchmarks/results/provenance.yaml` says of each CSV file which pages show it, which files of the code make it, and by
which command, at which commit and on which day its rows were made. Rows with columns of their own for commit and day
need no more. A table is stale if one of the files differs from that commit, in more than comments where it is YAML, and
in more than comments and docstrings where it is Python, unless `still_valid` says of each commit since why it does not
matter. Changes that are not committed do not count.
"""

import ast
import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from benchmarks.rows import DIRTY, UNKNOWN

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


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


def meaning(path: str, code: str) -> str:
    """Return what a file of Python or YAML says, without comments, docstrings and layout."""
    if path.endswith(".yaml"):
        return str(yaml.safe_load(code))
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    return ast.dump(tree)


def is_changed(path: str, revision: str) -> bool:
    """Return True if a file, which differs from a revision or is missing on one side, differs in more than words."""
    if not path.endswith((".py", ".yaml")):
        return True
    sides = [
        subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True)
        for commit in (revision, "HEAD")
    ]
    return any(side.returncode for side in sides) or len({meaning(path, side.stdout) for side in sides}) > 1


def reasons(table: Table) -> Iterator[str]:
    """Yield a line for each revision for which the table is stale."""
    for revision in table.revisions:
        if revision == UNKNOWN:
            yield "revision unknown"
            continue
        if revision.endswith(DIRTY):
            yield f"{revision}: the code had changes that are in no commit"
            continue
        for path in git("diff", "--name-only", revision, "HEAD", "--", *table.code).splitlines():
            if is_changed(path, revision):
                commits = git(
                    "log", "--no-merges", "--format=%h", "--abbrev=8", f"{revision}..HEAD", "--", path
                ).split()
                changes = [one for one in commits if one not in table.still_valid]
                if changes or not commits:  # without one, a merge has changed the file
                    yield f"{revision}: {path} has changed, last in {changes[0] if changes else 'a merge'}"
                    break


def has_history() -> bool:
    """Return True if the code lies in a repository with its whole history."""
    asked = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip() == "false"


def main() -> None:
    if not has_history():
        sys.exit("stale: the history of the code is not here as a whole; run `git fetch --unshallow` in a clone")
    stale = [(table, lines) for table in read_tables() if (lines := list(reasons(table)))]
    for table, lines in stale:
        print(f"{', '.join(table.files)} ({', '.join(table.pages)})", *lines, f"by {table.command}", sep="\n    ")
    sys.exit(bool(stale))


if __name__ == "__main__":
    main()
