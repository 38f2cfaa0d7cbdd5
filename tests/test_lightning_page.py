"""docs/guides/lightning.md: Lightning's loggers, profilers and EarlyStopping work from the page's configs."""

import csv
import re
import sys
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from tests.runs import EPOCHS, HORIZON, ROOT, TINY, Run, cli

PAGE = (ROOT / "docs" / "guides" / "lightning.md").read_text()
FILES = dict(re.findall(r'^```yaml title="([^"]+)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with the page's files."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def configs(*names: str) -> list[str]:
    return [argument for name in names for argument in ("--config", name)]


def test_a_run_with_the_pages_configs_is_logged_profiled_and_monitored(place: Path) -> None:
    built = cli(*TINY, *configs("csv.yaml", "profile.yaml", "stop.yaml"))

    with (place / "runs" / "digits" / "csv" / "version_0" / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["rollout/objective"]]
    run = Run(place / "runs" / "digits" / "version_0")
    objectives = run.scalars()["rollout/objective"]
    assert run.last.is_file(), "the first logger decides the folder"
    assert [int(row["step"]) for row in rows] == [step for step, _ in objectives]
    assert [step for step, _ in objectives] == [HORIZON * n for n in range(1, EPOCHS + 1)]
    assert [float(row["rollout/objective"]) for row in rows] == pytest.approx([value for _, value in objectives])

    profile = (place / "runs" / "profile" / "fit-simple.txt").read_text()
    (calls,) = re.findall(r"SingleDeviceStrategy\.training_step\s*\|[^|]*\|\s*(\d+)", profile)
    assert int(calls) == EPOCHS * HORIZON

    (stopping,) = (callback for callback in built.trainer.callbacks if isinstance(callback, EarlyStopping))
    assert stopping.monitor == "rollout/objective"
    assert stopping.best_score.item() == pytest.approx(
        max(value for _, value in objectives), abs=stopping.min_delta + 1e-6
    )


@pytest.mark.skipif("wandb" in sys.modules, reason="it is installed")
def test_a_logger_whose_package_is_missing_is_refused_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli(*TINY, *configs("wandb.yaml"))

    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(said) == 1 and "wandb" in said[0]
