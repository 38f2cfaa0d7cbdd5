"""docs/guides/stack.md: its programs grow a network as the page says, in Lightning, by YAML and in a loop."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn

from esper_lightning.callbacks import Stack
from esper_lightning.growth import stack
from tests.runs import ROOT

PAGE = (ROOT / "docs" / "guides" / "stack.md").read_text()

FILES = dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))

(LINE,) = re.findall(r"^```text\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)

(LOOP,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a folder with the page's files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_the_program_prints_the_line_of_the_page_and_its_checkpoint_is_that_of_the_plain_class(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page: dict[str, object] = {}

    exec(FILES["train.py"].replace("max_steps=100", "max_steps=100, accelerator='cpu', logger=False"), page)

    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Stack")]
    words, numbers = LINE.split("loss ")
    assert told.startswith(words)
    found, expected = (
        [float(number) for number in text.split(" → ")] for text in (told.removeprefix(f"{words}loss "), numbers)
    )
    assert found == pytest.approx(expected, abs=0.05)
    trained, plain = page["model"], page["plain"]
    assert isinstance(trained, nn.Module) and isinstance(plain, nn.Module)
    assert all(torch.equal(x, y) for x, y in zip(trained.parameters(), plain.parameters(), strict=True))


def test_the_loop_prints_the_sources_that_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    exec(LOOP, {})

    assert capsys.readouterr().out.strip() in LOOP


def test_the_layers_that_the_page_names_make_new_blocks_change_nothing() -> None:
    from mine import LitGPT, text

    (names,) = re.findall(r"the last layers of the branches: `(\(.*?\))`", PAGE)
    model, batch = LitGPT(depth=3), next(iter(text()))
    before = model.loss(batch)
    stack(model.blocks, to=6, new="zero", zero=eval(names))

    torch.testing.assert_close(model.loss(batch), before)


def test_the_config_grows_twice_with_lightnings_own_command_line() -> None:
    from mine import LitGPT, text

    class Data(LitGPT):
        def train_dataloader(self) -> object:
            return text()

    small = ["--trainer.max_steps=20", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    cli = LightningCLI(Data, args=["fit", "--config", "stack.yaml", *small], save_config_callback=None)

    (callback,) = (each for each in cli.trainer.callbacks if isinstance(each, Stack))
    assert callback.depths == [2, 4, 6]
