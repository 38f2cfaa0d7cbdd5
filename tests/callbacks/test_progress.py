"""Progress: bars on a terminal, lines elsewhere, or nothing."""

import re
from pathlib import Path

import pytest
from rich.console import Console

from callbacks import ProgressReport, progress
from tests.runs import EPOCHS, SaveEveryTick, fit, only_run, with_callback

SHOWN = ("--trainer.enable_progress_bar=true",)
LINE = (
    r"rollout (\d) of 3: objective -?\d\.\d{3}, accuracy \d\.\d{3}, return -?\d\.\d{3}, "
    r"\d+ host epochs/s, \d:\d\d:\d\d left"
)


def lines(captured: str) -> list[str]:
    return re.findall(f"^{LINE}$", captured, re.MULTILINE)


def test_where_nobody_watches_each_rollout_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, *SHOWN)

    assert lines(capsys.readouterr().out) == ["1", "2", "3"]


def test_fewer_lines_end_with_the_last_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, *SHOWN, "--progress.every=2")

    assert lines(capsys.readouterr().out) == ["2", "3"]


@pytest.mark.parametrize("flag", ["--progress.show=nothing", "--trainer.enable_progress_bar=false"])
def test_a_quiet_run_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    fit(tmp_path, *SHOWN, flag)

    assert "rollout" not in capsys.readouterr().out


def test_on_a_terminal_there_is_a_bar_for_the_rollout_and_one_for_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "Console", lambda: Console(force_terminal=True, width=160, color_system=None))
    fit(tmp_path, *SHOWN)

    shown = capsys.readouterr().out
    assert f"rollout {EPOCHS} of {EPOCHS}" in shown and "5/5" in shown and "15/15" in shown
    assert re.search(r"objective \d\.\d{3}, accuracy", shown)
    assert not lines(shown)


def test_a_resumed_run_counts_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, *with_callback(SaveEveryTick))
    capsys.readouterr()

    fit(tmp_path, *SHOWN, "--ckpt_path", str(only_run(tmp_path).checkpoints / "tick7.ckpt"))

    assert lines(capsys.readouterr().out) == ["2", "3"]


def test_no_rollouts_between_lines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"progress\.every must be at least 1 rollout, got 0"):
        ProgressReport(every=0)
