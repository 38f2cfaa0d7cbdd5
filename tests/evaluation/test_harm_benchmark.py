"""The benchmark of where waiting wins: its rows, and the tables that its page shows."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import harm
from benchmarks.rows import read_rows
from tests.runs import ROOT


def test_the_page_shows_what_the_rows_say() -> None:
    rows = read_rows(harm.RESULTS, harm.Row)
    page = (ROOT / "docs/results/zero_shot.md").read_text().partition("## Where waiting wins")[2].partition("\n## ")[0]

    def cells(lines: Iterable[str]) -> dict[str, list[str]]:
        split = ([cell.strip() for cell in line.replace("**", "").strip("| ").split("|")] for line in lines)
        return {row[0]: row[1:] for row in split}

    said, told = cells(page.splitlines()), cells(harm.table(rows))
    for task in ("Digits", "deep", "wide", "glyphs", "table", "wine", "text"):
        _, waiting, _, lead, counts, *_ = told[task]
        assert said[task][:3] == [waiting, lead, counts]

    lines = harm.checks(rows)
    checks, places = cells(lines[: lines.index("")]), ("another table", "unknown blueprint")
    names = {"without a check": "tamiyo", "score is higher": "score", "loss is lower": "loss"}
    names |= {"score is higher by a standard error": "score, 1 SE", "score is higher by the rent": "price"}
    names |= {"better of both at the end, by the objective": "better at the end"}
    for line, name in names.items():
        assert said[line] == [checks[place][checks["place"].index(name)] for place in places]


@pytest.mark.slow
def test_a_controller_is_played_once_on_a_held_out_setting(tmp_path: Path) -> None:
    csv = tmp_path / "harm.csv"
    for controllers in (["waiting"], ["waiting", "best rule"]):
        harm.play(csv, harm.zero_shot.CONFIG, ["another table"], controllers, 2)
    rows = read_rows(csv, harm.Row)
    assert [(row.controller, row.host) for row in rows] == [(n, h) for n in ("waiting", "best rule") for h in range(2)]
    waiting, rule = rows[:2], rows[2:]
    assert all(row.fossils == 0 and row.forks == 0.0 and 0.5 < row.test <= 1.0 for row in waiting)
    assert all(grown.flops >= row.flops > 0.0 for grown, row in zip(rule, waiting, strict=True))
