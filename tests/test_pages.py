"""Pages of the documentation: programs run as they stand, commands parse, and links lead somewhere."""

import csv
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from esper_lightning.cli import COMMANDS, Parser, make_cli
from esper_lightning.config_files import find_config
from tests.runs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
OWN_FILES = re.compile(r"\b(?:mine|parts|leaves|my_package)\b")
"""Names of files that only a page has."""


def blocks(page: Path, language: str, *, titled: bool = False) -> list[tuple[str, str]]:
    """Return title and text of the code blocks of a page in a language."""
    found = [(title, text) for kind, title, text in FENCE.findall(page.read_text()) if kind == language]
    return [block for block in found if bool(block[0]) == titled]


def commands() -> list[str]:
    """Return the commands of all pages."""
    shells = (text.replace("\\\n", " ") for page in PAGES for _, text in blocks(page, "sh"))
    lines = (line.partition(" #")[0].strip() for text in shells for line in text.splitlines())
    return sorted({line for line in lines if line.startswith("esper-lightning ") and not OWN_FILES.search(line)})


@pytest.fixture(scope="module")
def parser() -> Any:
    return make_cli(["--config", str(find_config("smoke"))], run=False, parser_kwargs={"exit_on_error": False}).parser


@pytest.mark.parametrize("command", commands())
def test_a_command_of_a_page_is_one(command: str, parser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # for benchmarks/settings
    _, name, *args = shlex.split(command)
    if name in COMMANDS:
        small = Parser(exit_on_error=False)
        small.add_function_arguments(COMMANDS[name], as_group=False, as_positional=True)
        small.parse_args(args)
        return
    assert name in ("fit", "validate", "test")
    settings = []
    for before, arg in zip(["", *args], args, strict=False):
        if before == "--config":
            settings.append(str(find_config("smoke" if arg.startswith("runs/") else arg)))
        elif before == "--ckpt_path":
            settings.pop()
        else:
            settings.append(arg)
    parser.parse_args(settings)


PROGRAMS = {
    "README.md": (("digits", "smoke"), ("max_epochs=30", "max_epochs=1")),
    "docs/guides/lightning.md": (),
    "docs/guides/python.md": (),
    "docs/guides/ppo.md": (),
    "docs/guides/gymnasium.md": (),
}
"""Pages whose programs run one after the other, with what is shortened in them."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to an empty folder from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("mine", "train_ppo"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_of_a_page_run(name: str, folder: Path) -> None:
    if name in ("docs/guides/ppo.md", "docs/guides/gymnasium.md"):
        pytest.importorskip("gymnasium")
    if name == "docs/guides/gymnasium.md":
        pytest.importorskip("sb3_contrib")
    programs = blocks(ROOT / name, "python")
    assert programs
    page: dict[str, object] = {}
    for _, program in programs:
        for long, short in PROGRAMS[name]:
            program = program.replace(long, short)
        exec(program, page)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "program", "args"),
    [
        ("lightning", "mine.py", ["fit", "--config", "mine.yaml", "--trainer.max_epochs=1"]),
        ("ppo", "train_ppo.py", ["fit", "--config", "cartpole.yaml", "--trainer.max_epochs=1"]),
    ],
)
def test_the_command_line_of_a_page_trains_from_its_config(
    page: str, program: str, args: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page == "ppo":
        pytest.importorskip("gymnasium")
    for language in ("python", "yaml"):
        for title, text in blocks(ROOT / "docs" / "guides" / f"{page}.md", language, titled=True):
            (folder / title).write_text(text)
    monkeypatch.setattr(sys, "argv", [program, *args])

    exec((folder / program).read_text(), {"__name__": "__main__"})

    assert len(list(folder.rglob("*.ckpt"))) == 1


def test_the_page_on_gymnasium_names_every_id() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("esper_lightning.gym")
    registered = {spec.name for spec in gymnasium.registry.values() if spec.namespace == "esper_lightning"}

    page = (ROOT / "docs" / "guides" / "gymnasium.md").read_text()
    assert set(re.findall(r"`(?:esper_lightning/)?(\w+)-v0`", page)) == registered


def test_the_returns_on_the_page_of_ppo_are_those_of_the_kept_results() -> None:
    rows = csv.DictReader((ROOT / "benchmarks" / "results" / "peers.csv").read_text().splitlines())
    measured: dict[str, list[float]] = {}  # runs of 50,000 steps come first
    for row in rows:
        if row["program"] == "ours":
            measured.setdefault(row["seed"], []).extend(float(row[name]) for name in ("mean_return", "last_return"))

    page = (ROOT / "docs" / "results" / "ppo.md").read_text()
    shown = re.findall(r"^\| (\d+) \| ([\d. |]+) \|$", page, re.MULTILINE)

    assert len(shown) == 5
    for seed, numbers in shown:
        assert [float(number) for number in numbers.split(" | ")] == pytest.approx(measured[seed], abs=0.051)


def test_every_link_between_pages_leads_to_a_file() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert lost == []
