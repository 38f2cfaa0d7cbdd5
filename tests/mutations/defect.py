"""A defect that some test must notice, and the program that shows it: one replacement in a copy of the project."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.runs import ROOT

LIMIT = 300.0
"""Seconds that the tests of one defect may take. A test that hangs on a defect has noticed it."""

FAILED, PASSED = 1, 0
"""Exit codes of pytest; any other means that the tests were not run."""


class Defect(NamedTuple):
    """One change of the source that makes the program wrong, and the test that must fail because of it."""

    name: str
    """A sentence that says what is wrong, with the finding's number in front if it is one."""
    file: str
    """Path of the changed file, relative to the repository."""
    text: str
    """The right code; it occurs exactly once in the file."""
    replacement: str
    """The wrong code."""
    test: str
    """Node id of the test that must fail (`tests/a/test_b.py::test_c`)."""


def copy_project(folder: Path) -> Path:
    """Copies the project without its environment, history and results to `folder`."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "site")
    return Path(shutil.copytree(ROOT, folder, ignore=ignored))


def run_tests(copy: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Runs tests of a copy, also those that are deselected by default, until the first failure."""
    # No bytecode is written: a file that is changed twice within a second could be taken for what it was before.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", "-x", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT)


def survives(defect: Defect, copy: Path) -> bool:
    """Puts a defect into a copy and says whether its test passes all the same. The copy is restored.

    Raises ValueError if the defect cannot be put there, or if the test does not run at all.
    """
    path = copy / defect.file
    source = path.read_text()
    if source.count(defect.text) != 1:
        raise ValueError(f"{defect.name}: {defect.file} has {source.count(defect.text)} places with {defect.text!r}")
    path.write_text(source.replace(defect.text, defect.replacement))
    try:
        ended = run_tests(copy, defect.test)
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(source)
    if ended.returncode not in (FAILED, PASSED):
        raise ValueError(f"{defect.name}: {defect.test} was not run:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.returncode == PASSED
