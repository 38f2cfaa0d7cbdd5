"""Every ablation is a valid setting of the program, and changes only what its name says."""

import csv
import re
import sys
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from benchmarks.ablations import ABLATIONS, COLUMNS, table
from esper_lightning.__main__ import main
from tests.runs import ROOT
from tests.tiers import rest_is_slow


@cache
def settings(config: str, *changes: str) -> dict[str, Any]:
    """Return the settings of a run by dotted name."""
    said = StringIO()
    with pytest.raises(SystemExit) as ended, redirect_stdout(said), patch.object(sys, "argv", sys.argv[:1]):
        main(["fit", "--config", str(ROOT / config), *changes, "--print_config"])
    assert ended.value.code == 0
    return dict(flat("", yaml.safe_load(said.getvalue())))


def flat(prefix: str, tree: Any) -> list[tuple[str, Any]]:
    """Yield the leaves of nested dicts."""
    if not isinstance(tree, dict):
        return [(prefix.removesuffix("."), tree)]
    return [leaf for name, below in tree.items() for leaf in flat(f"{prefix}{name}.", below)]


CHANGED = [name for name, (_, changes) in ABLATIONS.items() if changes]


@pytest.mark.parametrize(
    "name", rest_is_slow(CHANGED, {"no memory", "no masks", "reward sparse", "family, no counterfactuals"})
)
def test_an_ablation_changes_what_it_says(name: str) -> None:
    config, changes = ABLATIONS[name]
    before, after = settings(config), settings(config, *changes)
    flags = {flag.removeprefix("--") for flag in changes[::2]}
    assert {key for key in after if after[key] != before.get(key)} == flags
    assert set(before) == set(after)


def test_the_table_has_means_and_every_seed() -> None:
    values = {"accuracy": "0.7", "parameters": "900", "fossils": "2.5"}
    rows = [{"ablation": "no memory", "seed": str(seed), "objective": str(0.5 + seed / 10)} | values for seed in (0, 1)]
    (name,), (mean,), (each,), (kept,) = (list(column.cells) for column in table(rows).columns)
    assert (name, mean, each, kept) == ("no memory", "0.550", "0.500 0.600", "2.50")
    assert set(rows[0]) == set(COLUMNS)


def test_the_pages_rows_are_those_of_the_kept_results() -> None:
    page = (ROOT / "docs" / "results" / "ablations.md").read_text()
    kept = list(csv.DictReader((ROOT / "benchmarks" / "results" / "ablations.csv").read_text().splitlines()))
    shown = re.findall(r"^\| ([\w ,]+) \| (\d\.\d{3}) \| ([\d. ]+) \| (\d\.\d\d) \|$", page, re.MULTILINE)

    assert [name for name, *_ in shown] == list(dict.fromkeys(row["ablation"] for row in kept))
    for name, mean, each, fossils in shown:
        scores = [float(row["objective"]) for row in kept if row["ablation"] == name]
        assert each == " ".join(f"{score:.3f}" for score in scores) and len(scores) == 3
        assert mean == f"{sum(scores) / 3:.3f}"
        assert float(fossils) == pytest.approx(
            sum(float(row["fossils"]) for row in kept if row["ablation"] == name) / 3, abs=0.0051
        )
