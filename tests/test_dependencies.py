"""Declared dependencies are imported."""

import re
import tomllib
from collections import defaultdict
from importlib.metadata import packages_distributions

from tests.runs import ROOT

LIBRARY_EXTRAS = ("gym", "text")
"""Optional dependencies that are libraries; those of `dev` and `docs` are programs and plugins."""

FOLDERS = ("esper_lightning", "callbacks", "benchmarks", "tests")

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared() -> set[str]:
    """Return the normalised names of the distributions that the package declares."""
    extras = PYPROJECT["optional-dependencies"]
    lines = [*PYPROJECT["dependencies"], *(line for extra in LIBRARY_EXTRAS for line in extras[extra])]
    return {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in lines}


def imported_modules() -> set[str]:
    """Return the top-level modules that the project imports, at any place of a file."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {
        module for path in paths for module in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    }


def test_every_declared_dependency_is_imported() -> None:
    imported, modules_of = imported_modules(), defaultdict(set)
    for module, distributions in packages_distributions().items():
        for distribution in distributions:
            modules_of[distribution.lower().replace("_", "-")].add(module)

    assert declared() <= modules_of.keys(), "all are installed for tests"
    assert {name for name in declared() if not modules_of[name] & imported} == set()
