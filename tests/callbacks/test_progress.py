"""Progress report: bars on a terminal, lines elsewhere, or nothing."""

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from esper_lightning.callbacks import ProgressReport, progress
from tests.runs import EPOCHS, SaveEveryTick, fit, only_run, with_callback
from tests.tiers import rest_is_slow

SHOWN = ("--trainer.enable_progress_bar=true",)
QUICK = ("--data.env.horizon=2", *SHOWN)
LINE = (
    r"rollout (\d) of 3: objective -?\d\.\d{3}, accuracy \d\.\d{3}, return -?\d\.\d{3}, "
    r"\d+ host epochs/s, \d:\d\d:\d\d left"
)


def lines(captured: str) -> list[str]:
    return re.findall(f"^{LINE}$", captured, re.MULTILINE)


def test_without_a_terminal_each_rollout_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, *QUICK)

    assert lines(capsys.readouterr().out) == ["1", "2", "3"]


def test_fewer_lines_end_with_the_last_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, *QUICK, "--progress.every=2")

    assert lines(capsys.readouterr().out) == ["2", "3"]


@pytest.mark.parametrize("flag", ["--progress.show=nothing", "--trainer.enable_progress_bar=false"])
def test_a_quiet_run_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    fit(tmp_path, *QUICK, flag)

    assert "rollout" not in capsys.readouterr().out


def test_on_a_terminal_there_is_a_bar_for_the_rollout_and_one_for_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "Console", lambda: Console(force_terminal=True, width=160, color_system=None))
    fit(tmp_path, *QUICK, "--progress.show=bars")

    shown = capsys.readouterr().out
    assert f"rollout {EPOCHS} of {EPOCHS}" in shown and "2/2" in shown and "6/6" in shown
    assert "0:00:00 left" in shown
    assert re.search(r"objective \d\.\d{3}, accuracy", shown)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is there again"
    assert not lines(shown)


@pytest.mark.parametrize(
    "variables", rest_is_slow([{"FORCE_COLOR": "1"}, {"TERM": "dumb"}], lambda variables: "FORCE_COLOR" in variables)
)
def test_a_pipe_gets_lines_whatever_it_is_taken_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    fit(tmp_path, *QUICK)

    plain = "\n".join(Text.from_ansi(line).plain for line in capsys.readouterr().out.splitlines())
    assert lines(plain) == ["1", "2", "3"]


def test_bars_fit_a_narrow_terminal_and_say_how_long_it_takes() -> None:
    console = Console(force_terminal=True, width=60, color_system=None, file=StringIO())
    bars = progress.ProgressBars(console, ticks=12, total_ticks=6000, done_ticks=100)
    bars.update(bars.run, description="1:02:03 left")
    bars.note = "rollout 9 of 500: objective 0.541, accuracy 0.712, return 0.230"

    console.print(*bars.get_renderables(), sep="\n")

    lines = console.file.getvalue().splitlines()
    assert lines[1].startswith("1:02:03 left") and lines[1].rstrip().endswith("100/6000")
    assert max(map(len, lines)) <= 60


@pytest.mark.slow
def test_a_resumed_run_counts_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, *with_callback(SaveEveryTick))
    capsys.readouterr()

    fit(tmp_path, *SHOWN, "--ckpt_path", str(only_run(tmp_path).checkpoints / "tick7.ckpt"))

    assert lines(capsys.readouterr().out) == ["2", "3"]


def test_no_rollouts_between_lines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"progress\.every must be at least 1 rollout, got 0"):
        ProgressReport(every=0)
