"""docs/guides/growing.md: its examples produce the results that it shows."""

import re
from pathlib import Path

import pytest
import torch

from esper_lightning.blueprints import registry
from tests.runs import ROOT

PAGE = (ROOT / "docs" / "guides" / "growing.md").read_text()

FENCED = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

BLOCKS = [text for language, text in FENCED if language == "python"]

(LIFE,) = (text for language, text in FENCED if not language)


@pytest.fixture(autouse=True)
def own_blueprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unregister the blueprints that the page registers."""
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))


def test_every_snippet_runs_and_the_seed_lives_the_life_that_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    page: dict[str, object] = {}

    for block in BLOCKS:
        exec(block, page)

    printed = capsys.readouterr().out
    assert printed.startswith(LIFE), printed
    assert "FoldResult(slot='2', target_layer='2', reason='')" in printed
    assert page["growing"].slots["2"].stage.name == "FOSSILIZED"


def test_growth_takes_less_than_thirty_lines() -> None:
    _, grown, *_ = BLOCKS

    assert len([line for line in grown.splitlines() if line.strip()]) < 30
