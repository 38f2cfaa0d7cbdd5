"""Every defect of the table is noticed by the test that the table names for it."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutations.defect import Defect, copy_project, survives
from tests.mutations.forks import Forks, forks
from tests.mutations.table import DEFECTS
from tests.runs import ROOT


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(tmp_path_factory.mktemp("mutations") / "copy")


@pytest.fixture(scope="session")
def forked() -> Iterator[Forks]:
    with forks() as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_every_defect_is_noticed(defect: Defect, copy: Path, forked: Forks) -> None:
    assert not survives(defect, copy, forked)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_changes_one_place_of_the_source_and_leaves_it_python(defect: Defect) -> None:
    source = (ROOT / defect.file).read_text()
    assert source.count(defect.text) == 1
    assert defect.text != defect.replacement
    if defect.file.endswith(".py"):
        ast.parse(source.replace(defect.text, defect.replacement))


def test_names_of_defects_are_unique() -> None:
    assert [name for name, count in Counter(defect.name for defect in DEFECTS).items() if count > 1] == []
