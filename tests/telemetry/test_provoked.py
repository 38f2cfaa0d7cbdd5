"""Anomalies provoked in small real runs are named correctly; healthy runs raise none."""

from pathlib import Path

import pytest
import torch

from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.tamiyo.policy import RecurrentState
from tests.runs import cli
from tests.telemetry.provoke import SMALL, collect_printed_lines, dead_blueprints, open_gate, run
from tests.tiers import rest_is_slow

DEAD = ("dead_a", "dead_b", "dead_c", "dead_d")


@pytest.mark.slow
def test_blueprints_that_are_dead_at_birth_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = f"[{', '.join((*DEAD, 'conv_light', 'bottleneck'))}]"

    with dead_blueprints(monkeypatch, *DEAD), open_gate(monkeypatch):
        found = run(
            *(tmp_path, monkeypatch, "--trainer.max_epochs=1", "--data.n_envs=24", "--data.env.executor=loop"),
            f"--data.env.actions.blueprints={offered}",
        )

    named = {name for name in found.raised if name.startswith("dead_seeds")}
    assert named == {f"dead_seeds.{name}" for name in DEAD}
    assert found.levels["dead_seeds.conv_light"] == found.levels["dead_seeds.bottleneck"] == [0]
    line = found.line(min(named))
    assert "get no gradient: dead at birth; look at data.env.actions.blueprints, data.env.lifecycle.birth" in line
    assert f"blueprint {min(named).removeprefix('dead_seeds.')} " in line


@pytest.mark.slow
def test_seeds_that_fail_because_a_family_says_so_are_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(
        *(tmp_path, monkeypatch, "--trainer.max_epochs=1", "--data.n_envs=16"),
        "--data.env.actions.blueprints=[norm, conv_small, conv_light]",
        "--data.env.family.train=[{fail.norm: [1.0]}]",
    )

    assert found.raised == {"dead_seeds.norm"}
    assert "data.env.family" in found.line("dead_seeds.norm")


def test_a_gate_keeps_what_never_gets_a_gradient_out_in_the_first_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with dead_blueprints(monkeypatch, "dead_a"), pytest.raises(SystemExit):
        run(tmp_path, monkeypatch, "--data.env.actions.blueprints=[dead_a]")

    assert "its first gradient is zero: it could never learn" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("lr", ["0.0", "1e-12"])
def test_a_policy_without_a_learning_rate_is_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lr: str) -> None:
    found = run(tmp_path, monkeypatch, "--trainer.max_epochs=2", f"--model.ppo.lr={{start: {lr}, end: {lr}}}")

    assert found.levels["frozen_policy"] == [0, 1]
    assert found.raised == {"frozen_policy"}
    assert "look at model.ppo.lr" in found.line("frozen_policy")


@pytest.mark.slow
def test_one_step_per_update_leaves_ratios_at_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(*(tmp_path, monkeypatch, "--trainer.max_epochs=2"), "--model.ppo.epochs=1", "--model.ppo.minibatches=1")

    assert found.levels["ratio_one"] == [0, 1]
    assert found.raised == {"ratio_one"}
    assert "look at model.ppo.epochs, model.ppo.minibatches" in found.line("ratio_one")


@pytest.mark.parametrize(
    ("governor", "named"),
    rest_is_slow([(True, {"rolled_back", "gradient_health"}), (False, set())], lambda case: case[0]),
)
def test_exploding_hosts_are_the_learning_rate_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, governor: bool, named: set[str]
) -> None:
    found = run(
        *(tmp_path, monkeypatch, "--trainer.max_epochs=1", "--data.env.training.lr=1000"),
        *([] if governor else ["--trainer.callbacks=[esper_lightning.callbacks.Telemetry]"]),
    )

    assert found.raised == {"gradient_health"} | named
    for name in found.raised:
        assert "look at data.env.training.lr" in found.line(name)


@pytest.mark.slow
def test_large_steps_without_an_entropy_bonus_end_in_a_policy_that_tries_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(
        *(tmp_path, monkeypatch, "--trainer.max_epochs=8", "--model.ppo.entropy={start: 0.0, end: 0.0}"),
        *("--model.ppo.lr={start: 0.05, end: 0.05}", "--model.ppo.target_kl=null"),
    )

    collapsed = {name for name in found.raised if name.startswith("entropy.")}
    assert collapsed
    assert {"kl", "ratio_low", "ratio_high"} <= found.raised, "updates were far too large"
    line = found.line(min(collapsed))
    assert f"the head {min(collapsed).removeprefix('entropy.')} always makes the same choice" in line
    assert "look at model.ppo.entropy" in line
    assert "entropy.tempo" not in found.levels, "with one tempo on offer there is nothing to collapse"


@pytest.mark.slow
def test_a_policy_that_only_waits_is_told_from_one_that_has_nothing_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saturate the op head of the policy, so that it always waits."""
    begin = RolloutCollector.reset

    def saturated(loop: RolloutCollector) -> None:
        with torch.no_grad():
            loop.policy.heads.tables["op"].output.bias[0] = 20.0
        begin(loop)

    monkeypatch.setattr(RolloutCollector, "reset", saturated)
    found = run(tmp_path, monkeypatch, "--trainer.max_epochs=4")

    assert found.levels["waiting"] == [0, 0, 1, 1]
    assert found.levels["entropy.op"][:3] == [0, 0, 1]
    assert "collapsed to WAIT" in found.line("waiting") and "data.env.objective.price" in found.line("waiting")
    assert not found.raised & {"entropy.slot", "entropy.blueprint"}, "heads that never mattered"


@pytest.mark.slow
def test_a_state_that_is_a_tick_old_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick = RolloutCollector.step

    def stale(loop: RolloutCollector) -> object:
        before = RecurrentState(*(part.clone() for part in loop.state))
        step = tick(loop)
        loop.state = before
        return step

    monkeypatch.setattr(RolloutCollector, "step", stale)
    found = run(tmp_path, monkeypatch, "--trainer.max_epochs=2")

    assert found.levels["stale_state"] == [1, 1]
    assert "another recurrent state" in found.line("stale_state")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    found = run(
        *(tmp_path, monkeypatch, "--trainer.max_epochs=6", "--data.n_envs=16", "--model.ppo.minibatches=4"),
        f"--seed_everything={seed}",
    )

    # A critic after five updates may still be no better than the mean.
    assert found.raised <= {"explained_variance"}
    assert {"kl", "ratio_low", "entropy.op", "entropy.slot", "gradient_health", "memory"} <= set(found.levels)


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = "--model.ppo.lr={start: 0.0, end: 0.0}"
    with collect_printed_lines(monkeypatch):
        cli(*SMALL, frozen, "--trainer.default_root_dir", str(tmp_path), "--trainer.max_epochs=1")
    (last,) = tmp_path.rglob("last.ckpt")

    found = run(tmp_path, monkeypatch, frozen, "--trainer.max_epochs=3", "--ckpt_path", str(last))

    assert found.levels["frozen_policy"] == [0, 1, 1], "the first update was counted"
    assert found.line("frozen_policy").startswith("anomaly frozen_policy: raised at update 2: 0, bound 1e-06")
