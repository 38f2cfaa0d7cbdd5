"""Anomalies provoked in small real runs are named correctly; healthy runs raise none."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from esper_lightning.callbacks import telemetry
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.policy import RecurrentState
from tests.runs import CONFIGS, cli, only_run
from tests.tiers import rest_is_slow

SMALL = (
    *("--config", str(CONFIGS / "smoke.yaml"), "--data.env.horizon=8", "--data.env.training.batches=4"),
    *("--data.n_envs=8", "--model.evaluation.hosts=0", "--trainer.enable_progress_bar=false"),
)
"""Settings of a small run: eight hosts, eight ticks of four minibatches; half a second per rollout."""


class Report(NamedTuple):
    """Anomalies that a run reported, by name."""

    levels: dict[str, list[int]]  # 1 while it is raised, after each update from the first occurrence on
    lines: dict[str, str]  # with which each was first raised


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    def report(*args: str) -> Report:
        lines: list[str] = []
        monkeypatch.setattr(telemetry, "print_status", lines.append)
        cli(*SMALL, "--trainer.default_root_dir", str(tmp_path), *args)
        scalars = only_run(tmp_path).scalars()
        levels = {
            tag.removeprefix("anomaly/"): [int(value) for _, value in points]
            for tag, points in scalars.items()
            if tag.startswith("anomaly/")
        }
        raised = [name for name, values in levels.items() if any(values)]
        return Report(levels, {name: next(line for line in lines if f"anomaly {name}: " in line) for name in raised})

    return report


@pytest.mark.parametrize(
    ("flags", "raised", "said"),
    rest_is_slow(
        [
            (("--model.ppo.lr={start: 1e-12, end: 1e-12}",), {"frozen_policy"}, "look at model.ppo.lr"),
            (
                ("--model.ppo.epochs=1", "--model.ppo.minibatches=1"),
                {"ratio_one"},
                "look at model.ppo.epochs, model.ppo.minibatches",
            ),
            (("--data.env.training.lr=1000",), {"gradient_health", "rolled_back"}, "look at data.env.training.lr"),
            (
                ("--data.env.training.lr=1000", "--trainer.callbacks=[esper_lightning.callbacks.Telemetry]"),
                {"gradient_health"},
                "look at data.env.training.lr",
            ),
            (
                (
                    *("--data.n_envs=16", "--data.env.actions.blueprints=[norm, conv_small, conv_light]"),
                    "--data.env.family.train=[{fail.norm: [1.0]}]",
                ),
                {"dead_seeds.norm"},
                "seeds of blueprint norm get no gradient: dead at birth; look at data.env.actions.blueprints",
            ),
        ],
        lambda case: case[1] == {"gradient_health", "rolled_back"},
    ),
)
def test_a_fault_of_the_settings_is_named(
    flags: tuple[str, ...], raised: set[str], said: str, run: Callable[..., Report]
) -> None:
    found = run("--trainer.max_epochs=2", *flags)

    assert found.lines.keys() == raised
    assert all(said in line for line in found.lines.values())


@pytest.mark.slow
def test_large_steps_without_an_entropy_bonus_end_in_a_policy_that_tries_nothing(run: Callable[..., Report]) -> None:
    found = run(
        *("--trainer.max_epochs=16", "--model.ppo.entropy={start: 0.0, end: 0.0}", "--model.ppo.target_kl=null"),
        "--model.ppo.lr={start: 0.05, end: 0.05}",
    )

    collapsed = [name for name in found.lines if name.startswith("entropy.")]
    assert collapsed and {"kl", "ratio_low", "ratio_high"} <= found.lines.keys(), "updates were far too large"
    assert "always makes the same choice" in found.lines[collapsed[0]]
    assert "entropy.tempo" not in found.levels, "with one tempo on offer there is nothing to collapse"


@pytest.mark.slow
def test_a_policy_that_only_waits_is_told_from_one_that_has_nothing_left_to_do(
    run: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saturate the op head of the policy, so that it always waits."""
    begin = RolloutCollector.reset

    def saturated(loop: RolloutCollector) -> None:
        with torch.no_grad():
            loop.policy.heads.tables["op"].layers[2].bias[0] = 20.0
        begin(loop)

    monkeypatch.setattr(RolloutCollector, "reset", saturated)
    found = run("--trainer.max_epochs=4")

    assert found.levels["waiting"] == [1, 1], "from the third update on"
    assert found.levels["entropy.op"][0] == 1
    assert "collapsed to WAIT" in found.lines["waiting"] and "data.env.objective.price" in found.lines["waiting"]
    assert not found.lines.keys() & {"entropy.slot", "entropy.blueprint"}, "heads that never mattered"


@pytest.mark.slow
def test_a_state_that_is_a_tick_old_is_found_before_the_first_step(
    run: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    tick = RolloutCollector.step

    def stale(loop: RolloutCollector) -> object:
        before = RecurrentState(*(part.clone() for part in loop.state))
        step = tick(loop)
        loop.state = before
        return step

    monkeypatch.setattr(RolloutCollector, "step", stale)
    found = run("--trainer.max_epochs=2")

    assert found.levels["stale_state"] == [1, 1]
    assert "another recurrent state" in found.lines["stale_state"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_raises_nothing(run: Callable[..., Report], seed: int) -> None:
    found = run(
        *("--trainer.max_epochs=6", "--data.n_envs=16", "--model.ppo.minibatches=4", f"--seed_everything={seed}")
    )

    # A critic after five updates may still be no better than the mean.
    assert found.levels.keys() <= {"explained_variance"}, "what never occurred has no plot"
