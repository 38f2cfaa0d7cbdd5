import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from esper_lightning.evaluation.compare import Interval, Outcome, mean_interval, paired_difference
from esper_lightning.evaluation.report import show, table, write


@pytest.fixture
def outcomes() -> list[Outcome]:
    random = np.random.default_rng(0)
    host = random.uniform(0.3, 0.9, size=6)
    return [
        Outcome("tamiyo", host + 0.1, np.array([410, 390, 682, 410, 390, 410]), host + 0.08),
        Outcome("wait-only", host, np.full(6, 390), host + 0.0),
        Outcome("random, valid", host - 0.05, random.integers(390, 900, 6), host - 0.1 + 0.01 * random.normal(size=6)),
    ]


def test_an_interval_is_shown_as_mean_and_half_width() -> None:
    assert show(Interval(0.5731, 0.5561, 0.5901), 3) == "0.573 ± 0.017"
    assert show(Interval(-412.4, -420.4, -404.4), 0) == "-412 ± 8"


def test_the_csv_reads_back_as_one_row_per_controller(outcomes: list[Outcome], tmp_path: Path) -> None:
    write(outcomes, tmp_path)

    with (tmp_path / "evaluation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["controller"] for row in rows] == ["tamiyo", "wait-only", "random, valid"]
    assert [row["hosts"] for row in rows] == ["6"] * 3
    for row, outcome in zip(rows, outcomes, strict=True):
        for column in ("accuracy", "parameters", "objective"):
            read = [float(row[f"{column}_{end}"]) for end in ("mean", "low", "high")]
            assert read == pytest.approx(mean_interval(getattr(outcome, column)), rel=1e-5)
        read = [float(row[f"ahead_{end}"]) for end in ("mean", "low", "high")]
        assert read == pytest.approx(paired_difference(outcomes[0], outcome), rel=1e-5)
    assert float(rows[1]["ahead_mean"]) == pytest.approx(0.08)


def test_the_json_reads_back_as_every_host_of_every_controller(outcomes: list[Outcome], tmp_path: Path) -> None:
    write(outcomes, tmp_path)

    read = json.loads((tmp_path / "evaluation.json").read_text())
    assert list(read) == ["tamiyo", "wait-only", "random, valid"]
    for outcome in outcomes:
        for column in ("accuracy", "parameters", "objective"):
            assert read[outcome.controller][column] == getattr(outcome, column).tolist()


def test_a_report_makes_its_folder_and_replaces_an_older_one(outcomes: list[Outcome], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "digits"
    write(outcomes, folder)
    write(outcomes[:1], folder)

    assert list(json.loads((folder / "evaluation.json").read_text())) == ["tamiyo"]
    assert len((folder / "evaluation.csv").read_text().splitlines()) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["evaluation.csv", "evaluation.json"]


def test_the_table_compares_every_controller_with_the_first(outcomes: list[Outcome]) -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(table(outcomes))
    shown = console.file.getvalue()

    lines = {name: next(line for line in shown.splitlines() if name in line) for name in ("wait-only", "random, valid")}
    assert "6 fresh hosts" in shown
    assert "0.080 ± 0.000" in lines["wait-only"], "a constant lead has no spread"
    assert "390 ± 0" in lines["wait-only"]
    assert show(mean_interval(outcomes[2].accuracy), 3) in lines["random, valid"]


def test_a_single_host_can_be_reported(tmp_path: Path) -> None:
    only = Outcome("tamiyo", np.array([0.5]), np.array([390]), np.array([0.45]))
    write([only], tmp_path)

    with (tmp_path / "evaluation.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["objective_mean"], row["objective_low"], row["objective_high"]) == ("0.45",) * 3
