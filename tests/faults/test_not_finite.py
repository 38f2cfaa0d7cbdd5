"""Runs whose rewards, policy or normalisers are not finite go on, or end in one line, and never lose a checkpoint."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from lightning import Callback, Trainer

from esper_lightning.checkpointing.validate import open_checkpoint
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.losses import ppo_terms
from esper_lightning.rewards import compute_terms
from tests.runs import EPOCHS, HORIZON, Run, fit, load, only_run, with_callback
from tests.tiers import rest_is_slow

TICKS = (1, HORIZON, HORIZON + 2, 2 * HORIZON)


def break_rewards(monkeypatch: pytest.MonkeyPatch, tick: int, hosts: tuple[int, ...], value: float) -> None:
    """Replace the reward of some of the two hosts at one tick, counted from 1.

    Behind every rollout as many rewards are those of its validation.
    """
    calls, at_call = 0, tick + (tick - 1) // HORIZON * HORIZON

    def broken(*args: Any) -> dict[str, float]:
        nonlocal calls
        at, host = divmod(calls, 2)
        calls += 1
        terms = compute_terms(*args)
        return terms | {"objective": value} if at + 1 == at_call and host in hosts else terms

    monkeypatch.setattr("esper_lightning.envs.host_pool.compute_terms", broken)


class PoisonAt(Callback):
    """Callback that makes a part of the module NaN at the end of a tick."""

    def __init__(self, tick: int, part: str) -> None:
        self.tick = tick
        self.part = part

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if pl_module.collector.ticks == self.tick:
            pl_module.get_submodule(self.part).state_dict()["mean"].fill_(math.nan)


def ends_in_one_line(root: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Start a run that must end with the exit code of a diverged run, and return its only line."""
    with pytest.raises(SystemExit) as ended:
        fit(root, *flags)
    assert ended.value.code == 3
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Trainer.fit" not in line]
    assert line.startswith("error: "), line
    return line


def assert_checkpoints_load(run: Run) -> None:
    for path in run.checkpoints.glob("*.ckpt"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("tick", "value"),
    rest_is_slow(product(TICKS, [math.nan, math.inf, 1e38]), {(HORIZON + 2, math.nan)}),
)
def test_a_host_whose_reward_is_none_is_left_out_of_one_update_and_the_run_goes_on(
    tick: int, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_rewards(monkeypatch, tick, (1,), value)

    fit(tmp_path)

    run, update = only_run(tmp_path), (tick - 1) // HORIZON + 1
    place = f"in environment 1 at step {tick - HORIZON * (update - 1)} the reward term objective is {value:g}"
    assert f"1 of 2 environments are left out of update {update}: {place}" in " ".join(capsys.readouterr().out.split())
    left_out = [count for _, count in run.scalars()["train/left_out"]]
    assert left_out == [float(number == update) for number in range(1, EPOCHS + 1)]
    assert load(run.last)["callbacks"]["RolloutState"]["loop"]["ticks"] == EPOCHS * HORIZON
    assert_checkpoints_load(run)


@pytest.mark.parametrize("tick", rest_is_slow(TICKS, {HORIZON + 2}))
def test_a_rollout_without_any_finite_reward_ends_in_one_line_and_the_checkpoints_before_it_load(
    tick: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_rewards(monkeypatch, tick, (0, 1), math.nan)

    line = ends_in_one_line(tmp_path, capsys)

    run, rollout = only_run(tmp_path), (tick - 1) // HORIZON
    assert f"at step {tick - HORIZON * rollout} the reward term objective is nan; for a reward lower" in line
    assert run.last.exists() == (rollout > 0)
    assert_checkpoints_load(run)


@pytest.mark.slow
@pytest.mark.parametrize("first", [12, 15, 20])
def test_three_minibatches_in_a_row_that_are_not_finite_end_in_one_line_and_the_checkpoints_load(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of three updates of 12 minibatches fails."""
    seen = 0

    def broken(*args: Any) -> Any:
        nonlocal seen
        terms, here = ppo_terms(*args), first <= seen < first + 3
        seen += 1
        return terms._replace(policy=terms.policy * math.nan) if here else terms

    monkeypatch.setattr("esper_lightning.module.ppo_terms", broken)

    line = ends_in_one_line(tmp_path, capsys, "--model.ppo.target_kl=null")

    run = only_run(tmp_path)
    assert "3 minibatches in a row is not finite; lower model.ppo.lr, or set model.ppo.target_kl, and go on" in line
    assert load(run.last)["callbacks"]["RolloutState"]["loop"]["ticks"] == HORIZON
    assert_checkpoints_load(run)
    monkeypatch.undo()
    fit(tmp_path, "--ckpt_path", str(run.last))
    assert load(run.last)["callbacks"]["RolloutState"]["loop"]["ticks"] == EPOCHS * HORIZON


@pytest.mark.parametrize(
    ("lr", "target_kl"),
    rest_is_slow(product(["1e30", "1e20"], ["null", "0.02"]), {("1e30", "null")}),
)
def test_a_huge_learning_rate_ends_in_one_line_that_says_to_lower_it(
    lr: str, target_kl: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ends_in_one_line(
        tmp_path, capsys, f"--model.ppo.lr.start={lr}", f"--model.ppo.lr.end={lr}", f"--model.ppo.target_kl={target_kl}"
    )

    assert "lower model.ppo.lr" in line
    assert_checkpoints_load(only_run(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("lr", ["0.1", "100"])
def test_a_learning_rate_that_is_far_too_large_but_finite_breaks_nothing(lr: str, tmp_path: Path) -> None:
    fit(tmp_path, f"--model.ppo.lr.start={lr}", f"--model.ppo.lr.end={lr}", "--model.ppo.target_kl=null")

    assert_checkpoints_load(only_run(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("part", "tick"), list(product(["value_norm", "observation_norm"], TICKS)))
def test_a_normaliser_of_nan_ends_in_one_line_and_is_never_saved(
    part: str, tick: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends_in_one_line(tmp_path, capsys, *with_callback(PoisonAt, tick=tick, part=part))

    assert_checkpoints_load(only_run(tmp_path))
