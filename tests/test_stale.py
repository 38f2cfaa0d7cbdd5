"""Each kept result says which code made it, and those of README are of today's code."""

import csv
import datetime
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from benchmarks import rows, stale
from tests.runs import ROOT


@pytest.fixture
def history() -> None:
    if not stale.has_history():
        pytest.skip("the history of the repository is not here, or not as a whole")


def test_each_kept_result_has_one_entry_with_pages_code_command_and_days() -> None:
    tables = stale.read_tables()
    names = [path.name.replace("_members.csv", ".csv") for path in stale.RESULTS.glob("*.csv")]
    assert sorted(name for table in tables for name in table.files) == sorted(set(names))
    for table in tables:
        assert table.command and all((ROOT / page).is_file() for page in table.pages), table.files
        assert [code for code in table.code if not list(ROOT.glob(code))] == [], table.files
    entries = yaml.safe_load((stale.RESULTS / "provenance.yaml").read_text())["tables"].values()
    days = [part["date"] for entry in entries for part in entry.get("made", ())]
    assert all(isinstance(day, datetime.date) for day in days)


def test_each_commit_of_a_result_is_in_the_history(history: None) -> None:
    for table in stale.read_tables():
        commits = [name for name in table.revisions if name != stale.UNKNOWN and not name.endswith(rows.DIRTY)]
        for commit in [*commits, *table.still_valid]:
            stale.git("merge-base", "--is-ancestor", commit, "HEAD")


def test_no_table_of_the_readme_is_older_than_its_code(history: None) -> None:
    shown = [table for table in stale.read_tables() if "README.md" in table.pages]
    assert shown and [reason for table in shown for reason in stale.reasons(table)] == []


def test_a_table_is_stale_after_a_commit_that_changes_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    monkeypatch.setattr(stale, "RESULTS", tmp_path)
    entry = {"pages": ["README.md"], "code": ["a.py b"], "command": "python a.py"}

    def commit(name: str, text: str = "1\n") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with (tmp_path / name).open("a") as file:
            file.write(text)
        stale.git("add", name)
        stale.git("-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", name)
        return stale.git("rev-parse", "HEAD").strip()

    def told(**more: object) -> str:
        (tmp_path / "provenance.yaml").write_text(yaml.safe_dump({"tables": {"x.csv": {**entry, **more}}}))
        with pytest.raises(SystemExit) as ended:
            stale.main()
        out = capsys.readouterr().out
        assert ended.value.code == bool(out)
        return out

    stale.git("init", "-q")
    (tmp_path / "x.csv").write_text("loss\n1\n")
    first, other = commit("a.py", "x = 1\n"), commit("c.py")
    made = [{"stored": first, "date": "2026-11-28"}]
    assert told(made=made) == "" and "unknown" in told()
    commit("a.py", '"""Words."""  # and more\n')
    assert told(made=made) == "", "comments and docstrings do not make rows"
    change = commit("b/b.py")
    assert f"{first}: b/b.py has changed, last in {change[:8]}" in told(made=made)
    assert told(made=made, still_valid={change[:8]: "no rows by it"}) == ""
    assert told(made=[{"revision": change}]) == ""

    (tmp_path / "x.csv").write_text(f"loss,revision\n1,{change}\n2,{other}\n")
    assert f"{other}: b/b.py" in told() and f"{change}:" not in told()
    (tmp_path / "x.csv").write_text(f"loss,revision\n1,{change}-dirty\n")
    assert "in no commit" in told()

    (tmp_path / "x.csv").write_text("loss\n1\n")
    config = commit("b/c.yaml", "x: 1\n")
    commit("b/c.yaml", "# 2\n")
    assert told(made=[{"revision": config}]) == "", "nor do comments of YAML"
    with_value = commit("b/c.yaml", "y: 2\n")
    assert f"b/c.yaml has changed, last in {with_value[:8]}" in told(made=[{"revision": config}])


def test_appended_rows_have_commit_and_day_and_older_rows_keep_them_empty(tmp_path: Path) -> None:
    class Row(NamedTuple):
        name: str
        loss: float

    for name in ("new.csv", "old.csv"):
        path, before = tmp_path / name, [Row("a, b", 1.0)] * (name == "old.csv")
        if before:
            path.write_text('name,loss\n"a, b",1.0\n')
        with rows.appended_rows(path, Row) as append:
            append([Row("c", 2.0)])

        assert rows.read_rows(path, Row) == [*before, Row("c", 2.0)]
        *older, last = csv.DictReader(path.read_text().splitlines())
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
        revision = last["revision"].removesuffix(rows.DIRTY)
        assert head.startswith(revision) if head else revision == rows.UNKNOWN
        assert last["date"] == datetime.date.today().isoformat()
        assert all(row["revision"] == row["date"] == "" for row in older)
