"""A defect that some test must notice, and whether it does: one replacement in a copy of the project."""

import shutil
from pathlib import Path
from typing import NamedTuple

from tests.mutations.forks import Forks
from tests.runs import ROOT

FAILED, PASSED = 1, 0
"""Exit codes of pytest; another one that is not negative means that the tests were not run."""


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
    return Path(shutil.copytree(ROOT, folder, ignore=ignored, symlinks=True))


def survives(defect: Defect, copy: Path, forks: Forks) -> bool:
    """Puts a defect into a copy and says whether its test passes all the same. The copy is restored.

    A test that hangs, or ends its process, has noticed the defect. Raises ValueError if the defect cannot be put there,
    or if the test does not run at all.
    """
    path = copy / defect.file
    source = path.read_text()
    if source.count(defect.text) != 1:
        raise ValueError(f"{defect.name}: {defect.file} has {source.count(defect.text)} places with {defect.text!r}")
    path.write_text(source.replace(defect.text, defect.replacement))
    output = copy.with_suffix(".txt")
    try:
        code = forks.run(copy, output, defect.test)
    finally:
        path.write_text(source)
    if code > FAILED:
        raise ValueError(f"{defect.name}: {defect.test} was not run:\n{output.read_text()[-3000:]}")
    return code == PASSED
