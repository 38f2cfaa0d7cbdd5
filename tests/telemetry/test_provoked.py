"""Anomalies provoked in small real runs are named correctly; healthy runs raise none."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.blueprints import registry
from esper_lightning.callbacks import telemetry
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.tamiyo.policy import RecurrentState
from tests.runs import CONFIGS, cli, only_run
from tests.tiers import rest_is_slow

SMALL = (
    *("--config", str(CONFIGS / "smoke.yaml"), "--data.env.horizon=8", "--data.env.training.batches=4"),
    *("--data.n_envs=8", "--model.evaluation.hosts=0", "--trainer.enable_progress_bar=false"),
)
"""Settings of a small run: eight hosts, eight ticks of four minibatches; half a second per rollout."""


class RunReport:
    """Anomalies that a run reported: printed lines, and by name whether they were raised after each update, 0 or 1."""

    def __init__(self, root: Path, lines: list[str]) -> None:
        self.lines = lines
        scalars = only_run(root).scalars()
        self.levels = {
            tag.removeprefix("anomaly/"): [int(value) for _, value in points]
            for tag, points in scalars.items()
            if tag.startswith("anomaly/")
        }

    @property
    def raised(self) -> set[str]:
        """Anomalies that were ever raised."""
        return {name for name, levels in self.levels.items() if any(levels)}

    def line(self, name: str) -> str:
        """Return the line with which an anomaly was first raised."""
        return next(line for line in self.lines if line.startswith(f"anomaly {name}: "))


@contextmanager
def collect_printed_lines(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect the lines that telemetry prints."""
    lines: list[str] = []
    with patch.context() as inner:
        inner.setattr(telemetry, "print_status", lines.append)
        yield lines


def run(root: Path, patch: pytest.MonkeyPatch, *args: str) -> RunReport:
    """Run a small training with its folder below `root`."""
    with collect_printed_lines(patch) as lines:
        cli(*SMALL, "--trainer.default_root_dir", str(root), *args)
    return RunReport(root, lines)


class GradientlessSeed(nn.Module):
    """x + relu(norm(conv(x))) with all parameters zero: an identity whose ReLU never passes a gradient back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)
        self.norm = nn.GroupNorm(1, channels)

    def start_as_identity(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x.contiguous())))


@contextmanager
def dead_blueprints(patch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """Register blueprints of `Stillborn` for the duration of the context."""
    with patch.context() as inner:
        inner.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))
        for name in names:
            register = registry.register(
                name, {"image"}, parameters=lambda c: c * c + 3 * c, flops=lambda c, n: 2 * n * c * c
            )
            register(GradientlessSeed)
        yield


@contextmanager
def open_gate(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every seed pass gate G0, as if its trial batch had happened to give it a gradient."""
    with patch.context() as inner:
        inner.setattr("esper_lightning.growth.probe._reasons_against", lambda slot, trial: [])
        yield


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


def test_a_gate_keeps_what_never_gets_a_gradient_out_in_the_first_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with dead_blueprints(monkeypatch, "dead_a"), pytest.raises(SystemExit):
        run(tmp_path, monkeypatch, "--data.env.actions.blueprints=[dead_a]")

    assert "its first gradient is zero: it could never learn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "raised", "said"),
    rest_is_slow(
        [
            (("--model.ppo.lr={start: 0.0, end: 0.0}",), {"frozen_policy"}, "look at model.ppo.lr"),
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
                "data.env.family",
            ),
        ],
        lambda case: case[1] == {"gradient_health", "rolled_back"},
    ),
)
def test_a_fault_of_the_settings_is_named(
    flags: tuple[str, ...], raised: set[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(tmp_path, monkeypatch, "--trainer.max_epochs=2", *flags)

    assert found.raised == raised
    assert all(said in found.line(name) for name in raised)


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
            loop.policy.heads.tables["op"].layers[2].bias[0] = 20.0
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
