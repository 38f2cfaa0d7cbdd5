"""docs/guides/extending.md: its files work together, on the command line and in Python."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper_lightning.blueprints import registry
from tests.runs import CONFIGS, ROOT, cli, only_run

PAGE = (ROOT / "docs" / "guides" / "extending.md").read_text()
FENCED = re.findall(r'^```python title="([\w.]+)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
FILES = {name: "\n\n".join(text for named, text in FENCED if named == name) for name, _ in FENCED}
(COMMAND,) = re.findall(r"^python train\.py (fit .*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a folder with the page's files, and remove the registered blueprint afterwards."""
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    sys.modules.pop("parts", None)


def test_the_page_has_an_example_of_each_part() -> None:
    assert set(FILES) == {"train.py", "parts.py", "compare.py"}
    for name in ("pointwise", "TwoLayers", "EvenDigits", "GrowOnce", "Occupied"):
        assert re.search(rf"^(?:def|class) {name}\b", FILES["parts.py"], re.MULTILINE), name


def test_blueprint_host_task_and_callback_train_together(folder: Path) -> None:
    first, *rest = FILES["train.py"].splitlines()
    assert first.startswith("import parts") and rest[-1] == "main()"
    exec(first, {})
    words = re.findall(r"'([^']*)'|([^\s'\\]+)", COMMAND)
    command, *flags = (quoted or plain for quoted, plain in words)
    flags[flags.index("configs/smoke.yaml")] = str(CONFIGS / "smoke.yaml")

    assert command == "fit"
    built = cli(
        *(*flags, "--trainer.max_epochs=1", "--data.env.horizon=4", "--data.env.training.batches=1"),
        *("--trainer.default_root_dir", str(folder / "runs"), "--evaluation.hosts=0"),
        "--trainer.enable_progress_bar=false",
    )

    pool = built.datamodule.pool
    assert (pool.space.slot, pool.space.blueprint) == (["hidden"], ["pointwise"])
    assert pool.data.classes == 2
    assert len(only_run(folder / "runs").scalars()["mine/occupied"]) == 1


def test_the_controller_is_compared_with_waiting(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page: dict[str, object] = {}
    exec(FILES["compare.py"], page)

    assert "Interval(" in capsys.readouterr().out
    assert page["ours"].trace.ops.max() > 0, "something has grown"
    assert page["waiting"].trace.ops.max() == 0
