"""docs/guides/gymnasium.md: its examples run, and it names every id."""

import re

import pytest

from tests.runs import ROOT

PAGE = (ROOT / "docs" / "guides" / "gymnasium.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_names_every_id() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("esper_lightning.gym")
    registered = {spec.name for spec in gymnasium.registry.values() if spec.namespace == "esper_lightning"}

    assert set(re.findall(r"`(?:esper_lightning/)?(\w+)-v0`", PAGE)) == registered


@pytest.mark.slow
def test_the_pages_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("sb3_contrib")
    monkeypatch.chdir(ROOT)
    page: dict[str, object] = {}

    for block in PYTHON:
        exec(block, page)

    assert page["frame"].dtype.name == "uint8" and page["infos"]["objective"].shape == (4,)
    assert page["action"].shape == (8,) and page["envs"].num_envs == 2
