"""Progress lines: one for each rollout, or for every so many."""

import re
from pathlib import Path

import pytest

from esper_lightning.callbacks import ProgressLines
from tests.runs import SaveEveryTick, fit, only_run, with_callback

QUICK = ("--data.env.horizon=2",)
LINE = (
    r"rollout (\d) of 3: objective -?\d\.\d{3}, accuracy \d\.\d{3}, return -?\d\.\d{3}, "
    r"\d+ host epochs/s, \d:\d\d:\d\d left"
)


def lines(captured: str) -> list[str]:
    return re.findall(f"^{LINE}$", captured, re.MULTILINE)


@pytest.mark.parametrize(("every", "expected"), [(1, ["1", "2", "3"]), (2, ["2", "3"])])
def test_rollouts_have_lines_and_the_last_always_one(
    every: int, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, *QUICK, *with_callback(ProgressLines, every=every))

    assert lines(capsys.readouterr().out) == expected


@pytest.mark.slow
def test_a_resumed_run_counts_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, *QUICK, *with_callback(SaveEveryTick))
    capsys.readouterr()

    fit(tmp_path, *QUICK, "--ckpt_path", str(only_run(tmp_path).checkpoints / "tick3.ckpt"))

    assert lines(capsys.readouterr().out) == ["2", "3"]


def test_no_rollouts_between_lines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"every must be at least 1 rollout, got 0"):
        ProgressLines(every=0)
