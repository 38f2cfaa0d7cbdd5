"""docs/guides/ppo.md: its examples run; docs/results/ppo.md: its returns are those of the kept results."""

import csv
import re
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser

from esper_lightning.datamodules.gymnasium import VectorData
from esper_lightning.module import TamiyoModule
from tests.runs import ROOT, differences

PAGE = (ROOT / "docs" / "guides" / "ppo.md").read_text()
RESULTS = (ROOT / "docs" / "results" / "ppo.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(YAML,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_page_trains_a_policy_and_plays_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    page: dict[str, object] = {}

    for block in PYTHON:
        exec(block, page)

    assert "True tensor(" in capsys.readouterr().out
    assert page["module"].collector.ticks == 512
    assert page["step"].reward.tolist() == [1.0, 1.0]
    assert page["loaded"].ppo == page["module"].ppo and page["loaded"].policy_config.width == 64
    assert differences(dict(page["loaded"].state_dict()), dict(page["module"].state_dict())) == []
    assert page["action"].indices.shape == (2, 1)


def test_the_pages_config_is_one() -> None:
    pytest.importorskip("gymnasium")
    settings = yaml.safe_load(YAML)
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(TamiyoModule, "model")
    parser.add_lightning_class_args(VectorData, "data")

    built = parser.instantiate_classes(parser.parse_object({name: settings[name] for name in ("model", "data")}))

    assert built.model.ppo.sequence == 32
    assert (built.data.n_envs, built.data.pool.horizon) == (8, 256)


def test_the_pages_returns_are_those_of_the_benchmarks_file() -> None:
    rows = csv.DictReader((ROOT / "benchmarks" / "results" / "peers.csv").read_text().splitlines())
    measured: dict[str, list[float]] = {}  # runs of 50,000 steps come first
    for row in rows:
        if row["program"] == "ours":
            measured.setdefault(row["seed"], []).extend(float(row[name]) for name in ("mean_return", "last_return"))

    shown = re.findall(r"^\| (\d+) \| ([\d. |]+) \|$", RESULTS, re.MULTILINE)

    assert len(shown) == 5
    for seed, numbers in shown:
        assert [float(number) for number in numbers.split(" | ")] == pytest.approx(measured[seed], abs=0.051)
