"""Telemetry and ProgressLines: hosts every so many ticks, the policy and a line after every rollout."""

import re
from pathlib import Path

import pytest

from esper_lightning.callbacks import Telemetry
from esper_lightning.runtime.machine import PHASES
from tests.runs import HORIZON, SaveEveryTick, fit, only_run, with_callback

Scalars = dict[str, list[tuple[int, float]]]

ROLLOUT_ENDS = [HORIZON, 2 * HORIZON]


def steps(root: Path, tag: str) -> list[int]:
    return [step for step, _ in only_run(root).scalars()[tag]]


@pytest.mark.slow
def test_hosts_are_written_as_often_as_asked_and_rollouts_always(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=2", *with_callback(Telemetry, every_n_ticks=3))

    assert steps(tmp_path, "hosts/score") == steps(tmp_path, "growth/block3/DORMANT") == [3, 6, 9]
    assert steps(tmp_path, "rollout/objective") == steps(tmp_path, "train/kl") == ROLLOUT_ENDS


@pytest.fixture(scope="module")
def scalars(tmp_path_factory: pytest.TempPathFactory) -> Scalars:
    """Records of a run of two rollouts, written in every tick."""
    root = tmp_path_factory.mktemp("run")
    fit(root, "--trainer.max_epochs=2")
    return only_run(root).scalars()


def test_shares_of_stages_and_of_time_add_up_to_all(scalars: Scalars) -> None:
    stages = [points for tag, points in scalars.items() if tag.startswith("growth/block3/")]
    times = [points[:1] for tag, points in scalars.items() if tag.startswith("time/share.")]
    for shares in (*zip(*stages, strict=True), *zip(*times, strict=True)):
        assert sum(share for _, share in shares) == pytest.approx(1.0)
    assert all(share > 0.0 for ((_, share),) in times)


def test_seconds_of_a_tick_are_told_by_the_name_of_the_clock(scalars: Scalars) -> None:
    """S13: a run's telemetry says by which clock time was measured."""
    seconds = {phase: scalars[f"time/perf_counter.{phase}"] for phase in PHASES}
    for phase in ("train", "validate", "policy", "bookkeeping"):
        assert all(value > 0.0 for _, value in seconds[phase]), phase
    # The update is a part of the last tick of a rollout.
    assert {step for step, value in seconds["update"] if value > 0.0} == {HORIZON, 2 * HORIZON}
    assert not [tag for tag in scalars if "cuda_events" in tag]


def test_a_run_without_a_logger_still_trains(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=1", "--trainer.logger=false")

    assert not list(tmp_path.rglob("events*"))
    assert sorted(path.name for path in tmp_path.rglob("*.ckpt")) == ["best.ckpt", "last.ckpt"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_skipped_steps_are_written_where_there_can_be_any(tmp_path: Path, precision: str) -> None:
    fit(tmp_path, "--trainer.max_epochs=1", f"--data.env.training.precision={precision}")

    scalars = only_run(tmp_path).scalars()
    written = {tag for tag in scalars if "skipped_steps" in tag}
    each = {"skipped_steps/host0", "skipped_steps/host1"}
    assert written == ({"hosts/skipped_steps"} | each if precision == "fp16" else set())
    if written:
        sums = zip(*([skipped for _, skipped in scalars[tag]] for tag in sorted(each)), strict=True)
        assert [skipped for _, skipped in scalars["hosts/skipped_steps"]] == [sum(of_hosts) for of_hosts in sums]


def test_telemetry_of_no_ticks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Telemetry\.every_n_ticks must be at least 1, got 0"):
        Telemetry(every_n_ticks=0)


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
