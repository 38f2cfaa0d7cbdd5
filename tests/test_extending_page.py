"""docs/guides/extending.md: its files work together, on the command line and in Python."""

import csv
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from esper_lightning.__main__ import main
from esper_lightning.growth import Stage
from esper_lightning.rewards import RewardConfig, SlotStatus, compute_terms
from tests.rewards.ticks import EMPTY, host_step, slot_step
from tests.runs import ROOT, Run, cli, forgotten_parts, only_run

PAGE = (ROOT / "docs" / "guides" / "extending.md").read_text()
FENCED = re.findall(r'^```(?:python|yaml) title="([\w.]+)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
FILES = {name: "\n\n".join(text for named, text in FENCED if named == name) for name, _ in FENCED}
LINES = PAGE.replace("\\\n", " ")  # a command may take two
COMMANDS = [shlex.split(line) for line in re.findall(r"^esper-lightning (.*)$", LINES, re.MULTILINE)]
COMMAND, COMPARE, GROW, COMPARE_POLICY, TRAIN_THRIFTY = COMMANDS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a folder with the page's files, and forget afterwards what they have registered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    with forgotten_parts():
        yield tmp_path
    sys.modules.pop("parts", None)


def test_the_page_has_an_example_of_each_part() -> None:
    assert set(FILES) == {"mine.yaml", "parts.py", "compare.py"}
    defined = set(re.findall(r"^(?:def|class) (\w+)", FILES["parts.py"], re.MULTILINE))
    assert defined >= {"pointwise", "hidden", "TwoLayers", "EvenDigits", "GrowOnce", "Counting", "Occupied"}
    assert defined >= {"thrifty", "decisive"}


def test_all_parts_train_together_from_the_config(folder: Path) -> None:
    command, *flags = COMMAND
    assert flags[:2] == ["--config", "smoke"]

    assert command == "fit"
    built = cli(
        *(*flags, "--trainer.max_epochs=1", "--data.env.horizon=4", "--data.env.training.batches=1"),
        *(
            "--trainer.default_root_dir",
            str(folder / "runs"),
            "--model.evaluation.hosts=2",
            "--model.evaluation.controls=false",
        ),
        *("--trainer.enable_progress_bar=false", "--data.env.executor=parts.Counting"),
    )

    pool, run = built.datamodule.pool, only_run(folder / "runs")
    assert (pool.space.slot, pool.space.blueprint) == (["hidden"], ["pointwise", "hidden"])
    assert pool.data.classes == 2 and pool.executor.epochs == 2 * 4
    assert len(run.scalars()["mine/occupied"]) == 1
    assert {"reward/gain", "reward/size"} <= set(run.scalars())
    assert "parts.GrowOnce" in (run.folder / "evaluation" / "evaluation.csv").read_text()


@pytest.mark.slow
def test_the_reward_trains_alone_and_the_controller_is_compared_and_grows_a_network(folder: Path) -> None:
    root = folder / "runs" / "smoke"
    shorter = {
        "fit": ["--trainer.max_epochs=1", "--model.evaluation.hosts=0"],
        "test": ["--model.evaluation.hosts=2"],
    }
    for command in (TRAIN_THRIFTY, COMPARE, GROW, COMPARE_POLICY):
        with patch.object(sys, "argv", sys.argv[:1]):
            main([*command, *shorter.get(command[0], [])])

    run, of_rules = root / "version_0", root / "version_1"
    points = Run(run).scalars()
    (gain,), (size,), (total,) = (points[f"rollout/{tag}"] for tag in ("reward.gain", "reward.size", "return"))
    assert gain[1] + size[1] + points["rollout/reward.rollback"][0][1] == pytest.approx(total[1], abs=1e-5)
    for compared, first in ((of_rules / "evaluation", "parts.GrowOnce"), (run / "evaluation", "tamiyo")):
        with (compared / "evaluation.csv").open() as file:
            assert next(csv.DictReader(file))["controller"] == first
        assert (compared / "timeline.png").is_file()
    assert (folder / "grown" / "network.safetensors").is_file()


def test_the_second_reward_charges_for_seeds_that_wait(folder: Path) -> None:
    importlib.import_module("parts")
    long, short = (SlotStatus(Stage.PROBATIONARY, ticks, 9) for ticks in (3, 2))
    step = host_step(slot_step(long), slot_step(short), slot_step(EMPTY), objective=0.75)

    assert compute_terms(step, RewardConfig(mode="decisive")) == {"gain": 0.25, "waiting": -0.02}


@pytest.mark.slow
def test_the_controller_is_compared_with_waiting(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page: dict[str, object] = {}
    exec(FILES["compare.py"], page)

    assert "Interval(" in capsys.readouterr().out
    ops = page["ours"].trace.ops
    assert ops[:2].max() == 0 < ops[2].min(), "something grows in the third tick"
    assert page["waiting"].trace.ops.max() == 0
