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


@pytest.mark.parametrize(
    ("name", "words"), [("family", "it is {}, {} and {}"), ("family_held_out", "there {}, {} and {}")]
)
def test_the_lead_over_the_best_schedule_that_is_known_is_said(name: str, words: str) -> None:
    tables = script("tables")
    results = tables.read(ROOT / "benchmarks" / "results" / f"{name}.csv")
    schedules = [theirs for other in SCHEDULES for theirs in results[other].values()]
    best = max(schedules, key=lambda theirs: theirs.mean())
    leads = [tables.shown(mean_interval(ours - best), signed=True) for ours in results["tamiyo"].values()]
    assert words.format(*leads) in README


@pytest.mark.parametrize(
    ("config", "name", "rivals"),
    [
        ("digits_family", "family", {"best rule": RULES, "best schedule known": SCHEDULES}),
        ("digits_failing", "failing", {"climbing": ("climbing",), "best schedule found": ("best fixed",)}),
    ],
)
def test_a_config_says_what_it_came_to(config: str, name: str, rivals: dict[str, tuple[str, ...]]) -> None:
    tables = script("tables")
    results = tables.read(ROOT / "benchmarks" / "results" / f"{name}.csv")
    ours = list(results["tamiyo"].values())
    means = ", ".join(tables.number(seed.mean()) for seed in ours)
    header = (ROOT / "configs" / f"{config}.yaml").read_text()
    assert f"objective {means} on {len(ours[0])} fresh hosts" in header
    for said, names in rivals.items():
        best = max(theirs.mean() for other in names for theirs in results[other].values())
        assert f"{said} {tables.number(best)}" in header
