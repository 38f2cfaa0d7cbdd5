"""README.md: the map names every file that there is, and no other; its table is that of the kept results."""

import re

import pytest

from esper_lightning.evaluation.intervals import mean_interval
from tests.runs import ROOT
from tests.test_benchmarks import script

README = (ROOT / "README.md").read_text()

FOLDERS = ("callbacks", "configs", "docs", "benchmarks", "esper_lightning")


def mapped() -> set[str]:
    """Paths in the map: names on one line share the first one's folder, and indented ones lie in the package."""
    (block,) = re.findall(r"## Map\n\n```\n(.*?)```", README, re.DOTALL)
    paths = set()
    for line in block.splitlines():
        root = "esper_lightning" if line.startswith(" ") else ""
        folder = ""
        for name in re.findall(r"(?:^| {2})([\w/]+\.\w+)(?= |$)", line.strip()):
            folder = name.rpartition("/")[0] or folder
            paths.add("/".join(filter(None, (root, folder, name.rpartition("/")[2]))))
    return paths


def test_the_map_names_every_file() -> None:
    files = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".yaml", ".md", ".png") and path.name != "__init__.py"
    }
    there = mapped()

    assert files - there == set()
    assert {path for path in there if not (ROOT / path).exists()} == set()


def test_the_tables_are_those_of_the_kept_results() -> None:
    tables = script("tables")
    shown = re.findall(r"^\| controller \| objective .*\n\|---.*\n((?:\|.*\n)+)", README, re.MULTILINE)
    kept = ("digits", "family", "family_held_out")
    for name, rows in zip(kept, shown, strict=True):
        there = tables.markdown(tables.read(ROOT / "benchmarks" / "results" / f"{name}.csv"))
        assert len(rows.splitlines()) > 7
        assert set(rows.splitlines()) <= set(there)


RULES = ("random", "small static", "periodic", "climbing", "best fixed found", "conv_light once")


@pytest.mark.parametrize("name", ["family", "family_held_out"])
def test_where_hosts_differ_a_learned_controller_is_ahead_of_every_rule_and_schedule(name: str) -> None:
    tables = script("tables")
    results = tables.read(ROOT / "benchmarks" / "results" / f"{name}.csv")
    rivals = [theirs for other in (*RULES, "replayed") for theirs in results[other].values()]
    for ours in results["tamiyo"].values():
        leads = [mean_interval(ours - theirs) for theirs in rivals]
        assert len(ours) == 224 and min(lead.low for lead in leads) > 0.0
        for rule in ("periodic", "climbing"):
            assert (ours - results[rule][""]).mean() >= 0.02


def test_the_lead_over_the_best_schedule_that_is_known_is_said() -> None:
    tables = script("tables")
    results = tables.read(ROOT / "benchmarks" / "results" / "family.csv")
    schedules = [
        theirs for other in ("replayed", "best fixed found", "conv_light once") for theirs in results[other].values()
    ]
    best = max(schedules, key=lambda theirs: theirs.mean())
    leads = [tables.shown(mean_interval(ours - best), signed=True) for ours in results["tamiyo"].values()]
    assert f"it is {leads[0]}, {leads[1]} and {leads[2]}," in README
    assert f"best schedule known {tables.number(best.mean())}." in (ROOT / "configs" / "digits_family.yaml").read_text()

    held_out = tables.read(ROOT / "benchmarks" / "results" / "family_held_out.csv")
    (once,) = held_out["conv_light once"].values()
    assert all(
        once.mean() >= other.mean() for name in ("replayed", "best fixed found") for other in held_out[name].values()
    )
    first, second, third = (tables.number((ours - once).mean()) for ours in held_out["tamiyo"].values())
    assert f"the best that is known there, it is +{first}, +{second} and +{third}." in README
