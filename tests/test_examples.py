"""Notebooks in examples/: short, without stored outputs, and they run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

MOST_LINES = 30
"""Largest number of lines of code in a notebook."""


def code_of(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_holds_no_outputs(notebook: Path) -> None:
    cells = code_of(notebook)

    assert sum(bool(line.strip()) for cell in cells for line in cell["source"]) <= MOST_LINES
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [([], None)] * len(cells)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    content = nbformat.read(notebook, as_version=4)

    nbclient.NotebookClient(content, timeout=1100, resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)
    assert {
        "grow_in_depth": "by growth",
        "grow_my_network": "parameters",
        "own_controller": "greedy",
        "own_reward": "small static",
        "train_and_look": "climbing",
    }[notebook.stem] in texts
    pages = "".join(output.get("data", {}).get("text/html", "") for output in outputs)
    assert notebook.stem != "train_and_look" or "report.html" in pages
