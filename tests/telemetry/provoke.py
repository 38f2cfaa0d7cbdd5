"""Small real runs with a provoked fault, and the anomalies that they report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.blueprints import registry
from esper_lightning.callbacks import telemetry
from esper_lightning.cli import EsperCLI
from tests.runs import CONFIGS, cli, only_run

SMALL = (
    *("--config", str(CONFIGS / "smoke.yaml"), "--data.env.horizon=8", "--data.env.training.batches=4"),
    *("--data.n_envs=8", "--model.evaluation.hosts=0", "--trainer.enable_progress_bar=false"),
)
"""Settings of a small run: eight hosts, eight ticks of four minibatches; half a second per rollout."""


class RunReport:
    """Anomalies that a run reported: printed lines, and by name whether they were raised after each update, 0 or 1."""

    def __init__(self, cli: EsperCLI, root: Path, lines: list[str]) -> None:
        self.cli = cli
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


Run = Callable[..., RunReport]


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
        built = cli(*SMALL, "--trainer.default_root_dir", str(root), *args)
    return RunReport(built, root, lines)


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
