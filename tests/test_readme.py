"""README.md: the map names every file that there is, and no other; its table is that of the kept results."""

import re

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


def test_the_table_is_that_of_the_kept_results() -> None:
    tables = script("tables")
    there = set(tables.markdown(tables.read(ROOT / "benchmarks" / "results" / "digits.csv")))
    names = ("tamiyo", "random", "small static", "heuristic", "periodic", "climbing", "best fixed", "static tamiyo")
    rows = [line for line in README.splitlines() if line.startswith(tuple(f"| {name} |" for name in names))]
    assert len(rows) == len(names)
    assert set(rows) <= there
