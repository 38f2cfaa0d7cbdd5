"""README.md: the map names every file that there is, and no other; its table is that of the kept results."""

import re

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


def test_a_learned_controller_is_ahead_of_every_rule_where_hosts_differ() -> None:
    tables = script("tables")
    for name in ("family", "family_held_out"):
        results = tables.read(ROOT / "benchmarks" / "results" / f"{name}.csv")
        for other, least in (
            ("best fixed found", 0.04),
            ("conv_light once", 0.04),
            ("periodic", 0.02),
            ("climbing", 0.02),
        ):
            (theirs,) = results[other].values()
            for ours in results["tamiyo"].values():
                lead = mean_interval(ours - theirs)
                assert len(ours) == 224 and lead.mean >= least and lead.low > 0.0, (name, other)
