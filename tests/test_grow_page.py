"""docs/guides/grow.md: its programs grow a network as the page says, and its checkpoint loads without a Trainer."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from esper_lightning.callbacks import Grow
from esper_lightning.controllers.schedules import read_schedule
from tests.runs import ROOT

PAGE = (ROOT / "docs" / "guides" / "grow.md").read_text()

FILES = dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))

(LINES,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

(LOADING,) = re.findall(r"^```python\n(import torch\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

(HOOK,) = re.findall(r"^```python\n(class GrownClassifier.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

(EXPORT,) = re.findall(r"^```python\n(example = .*?)^```", PAGE, re.MULTILINE | re.DOTALL)

(SCHEDULE,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a folder with the page's files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_the_program_prints_the_lines_of_the_page_and_its_checkpoint_is_loaded_without_a_trainer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    L.seed_everything(0, verbose=False)
    page: dict[str, object] = {}

    exec(FILES["train.py"].replace("max_epochs=12", "max_epochs=12, accelerator='cpu', logger=False"), page)

    printed = capsys.readouterr().out
    told = [line for line in printed.splitlines() if line.startswith("Grow, tick")]
    assert told[: len(LINES.splitlines())] == LINES.splitlines()

    (saved,) = folder.rglob("*.ckpt")
    exec(LOADING.replace("best.ckpt", str(saved)), page)
    grown, images = page["model"], torch.rand(4, 1, 8, 8)
    trained = page["trainer"].lightning_module
    expected = trained.eval().model(images)
    assert torch.equal(grown.eval().model(images), expected)

    exec(HOOK.replace("best.ckpt", str(saved)), page)
    assert torch.equal(page["model"].eval().model(images), expected)

    exec(EXPORT, page)
    program = torch.export.load("grown.pt2").module()
    torch.testing.assert_close(program(images), expected)


def test_the_schedule_of_the_page_is_a_schedule(tmp_path: Path) -> None:
    (tmp_path / "schedule.json").write_text(SCHEDULE)

    schedule = read_schedule(tmp_path / "schedule.json")

    assert [(entry.tick, entry.op) for entry in schedule.entries] == [(1, "GERMINATE"), (9, "FOSSILIZE")]


@pytest.mark.slow
def test_the_config_of_the_page_grows_with_lightnings_own_command_line(folder: Path) -> None:
    sys.modules.pop("mine", None)
    from mine import Digits, LitClassifier

    small = ["--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    cli = LightningCLI(LitClassifier, Digits, args=["fit", "--config", "grow.yaml", *small])

    (callback,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, Grow))
    assert callback.growing.lifecycle.embargo_ticks == 2
    assert callback.growing.slots["2"].occupied
