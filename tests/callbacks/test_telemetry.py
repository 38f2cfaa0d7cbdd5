"""Telemetry: hosts every so many ticks, the policy after every rollout."""

from pathlib import Path

import pytest

from callbacks import Telemetry
from tests.runs import HORIZON, fit, only_run

ROLLOUT_ENDS = [HORIZON, 2 * HORIZON]


def steps(root: Path, tag: str) -> list[int]:
    return [step for step, _ in only_run(root).scalars()[tag]]


def test_hosts_are_written_as_often_as_asked_and_rollouts_always(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=2", "--telemetry.every_n_ticks=3")

    assert steps(tmp_path, "hosts/accuracy") == steps(tmp_path, "growth/block3/DORMANT") == [3, 6, 9]
    assert steps(tmp_path, "rollout/objective") == steps(tmp_path, "train/kl") == ROLLOUT_ENDS


def test_stages_of_a_slot_are_shares_of_all_hosts(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=1")

    scalars = only_run(tmp_path).scalars()
    stages = [points for tag, points in scalars.items() if tag.startswith("growth/block3/")]
    for at_tick in zip(*stages, strict=True):
        assert sum(share for _, share in at_tick) == 1.0


def test_where_time_goes_adds_up_to_all_of_it(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=1")

    scalars = only_run(tmp_path).scalars()
    shares = [points[0][1] for tag, points in scalars.items() if tag.startswith("time/share.")]
    assert all(share > 0.0 for share in shares)
    assert sum(shares) == pytest.approx(1.0)


def test_a_run_without_a_logger_still_trains(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=1", "--trainer.logger=false")

    assert not list(tmp_path.rglob("events*"))
    assert sorted(path.name for path in tmp_path.rglob("*.ckpt")) == ["best.ckpt", "latest.ckpt"]


def test_telemetry_of_no_ticks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"telemetry\.every_n_ticks must be at least 1, got 0"):
        Telemetry(every_n_ticks=0)
