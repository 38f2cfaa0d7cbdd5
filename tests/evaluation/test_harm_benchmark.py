"""The benchmark of where waiting wins: its rows, and the tables that its page shows."""

import re
from pathlib import Path

import pytest

from benchmarks import harm
from benchmarks.rows import read_rows
from tests.runs import ROOT


def test_the_page_shows_what_the_rows_say() -> None:
    rows = read_rows(harm.RESULTS, harm.Row)
    told = "\n".join([*harm.table(rows), *harm.checks(rows)])
    page = (ROOT / "docs/results/zero_shot.md").read_text().partition("## Where waiting wins")[2].partition("\n## ")[0]
    shown = re.findall(r"[+−]\.\d+ \[[^]]+\]", "".join(line for line in page.splitlines() if line.startswith("|")))
    assert len(shown) == 7 + 12
    assert [interval for interval in shown if interval not in told] == []


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
