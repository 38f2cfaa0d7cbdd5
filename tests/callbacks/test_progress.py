"""Progress lines: one for each rollout."""

import re
from pathlib import Path

import pytest

from tests.runs import SaveEveryTick, fit, only_run, with_callback

QUICK = ("--data.env.horizon=2",)
LINE = (
    r"rollout (\d) of 3: objective -?\d\.\d{3}, score \d\.\d{3}, return -?\d\.\d{3}, "
    r"\d+ host epochs/s, \d:\d\d:\d\d left"
)


def lines(captured: str) -> list[str]:
    return re.findall(f"^{LINE}$", captured, re.MULTILINE)


def test_every_rollout_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, *QUICK)

    assert lines(capsys.readouterr().out) == ["1", "2", "3"]


@pytest.mark.slow
def test_a_resumed_run_counts_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, *QUICK, *with_callback(SaveEveryTick))
    capsys.readouterr()

    fit(tmp_path, *QUICK, "--ckpt_path", str(only_run(tmp_path).checkpoints / "tick3.ckpt"))

    assert lines(capsys.readouterr().out) == ["2", "3"]
