"""README.md: its tables are those of the kept results."""

import re

import pytest

from esper_lightning.evaluation.intervals import mean_interval
from tests.runs import ROOT
from tests.test_benchmarks import script

README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_tables_are_those_of_the_kept_results() -> None:
    tables = script("tables")
    shown = re.findall(r"^\| controller \| objective .*\n\|---.*\n((?:\|.*\n)+)", README, re.MULTILINE)
    kept = ("digits", "family", "family_held_out")
    for name, rows in zip(kept, shown, strict=True):
        there = tables.markdown(tables.read(ROOT / "benchmarks" / "results" / f"{name}.csv"))
        assert len(rows.splitlines()) > 7
        assert set(rows.splitlines()) <= set(there)


RULES = ("random", "small static", "heuristic", "periodic", "climbing")

SCHEDULES = ("best fixed", "best per price", "conv_light once", "conv_light, attention", "replayed")


@pytest.mark.parametrize(("name", "over_schedules"), [("family", 0.04), ("family_held_out", 0.0)])
def test_where_hosts_differ_a_learned_controller_is_ahead_of_every_rule_and_schedule(
    name: str, over_schedules: float
) -> None:
    tables = script("tables")
    results = tables.read(ROOT / "benchmarks" / "results" / f"{name}.csv")
    for rivals, asked in ((RULES, 0.02), (SCHEDULES, over_schedules)):
        for ours in results["tamiyo"].values():
            leads = [mean_interval(ours - theirs) for other in rivals for theirs in results[other].values()]
            assert len(ours) == 224 and min(lead.low for lead in leads) > 0.0
            assert min(lead.mean for lead in leads) >= asked
