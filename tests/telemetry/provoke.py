"""Small real runs in which something is wrong, and what was said of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from callbacks import telemetry
from esper_lightning.blueprints import registry
from esper_lightning.cli import EsperCLI
from tests.runs import CONFIGS, cli, only_run

SMALL = (
    *("--config", str(CONFIGS / "smoke.yaml"), "--data.env.horizon=8", "--data.env.training.batches=4"),
    *("--data.n_envs=8", "--evaluation.hosts=0", "--trainer.enable_progress_bar=false"),
)
"""Eight hosts, eight ticks of four minibatches: half a second a rollout."""


class Found:
    """What a run said of itself."""

    def __init__(self, cli: EsperCLI, root: Path, lines: list[str]) -> None:
        self.cli = cli
        self.lines = lines
        scalars = only_run(root).scalars()
        self.levels = {
            tag.removeprefix("anomaly/"): [int(value) for _, value in points]
            for tag, points in scalars.items()
            if tag.startswith("anomaly/")
        }

    def at_least(self, level: int) -> set[str]:
        """Anomalies that have ever been at `level` (1: warning, 2: critical)."""
        return {name for name, levels in self.levels.items() if max(levels) >= level}

    def raised(self, name: str) -> str:
        """The line that an anomaly was first raised with."""
        return next(line for line in self.lines if line.startswith(f"anomaly {name}: "))


Run = Callable[..., Found]


@contextmanager
def listening(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines that telemetry says."""
    lines: list[str] = []
    with patch.context() as inner:
        inner.setattr(telemetry, "say", lines.append)
        yield lines


def run(root: Path, patch: pytest.MonkeyPatch, *args: str) -> Found:
    """A small run with a folder below `root`."""
    with listening(patch) as lines:
        built = cli(*SMALL, "--trainer.default_root_dir", str(root), *args)
    return Found(built, root, lines)


class Stillborn(nn.Module):
    """x + relu(norm(conv(x))), all zero as the identity: behind a ReLU of zero no gradient ever comes back."""

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
    """Blueprints of Stillborn, for as long as this lasts."""
    with patch.context() as inner:
        inner.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))
        for name in names:
            register = registry.register(
                name, {"image"}, parameters=lambda c: c * c + 3 * c, flops=lambda c, n: 2 * n * c * c
            )
            register(Stillborn)
        yield


@contextmanager
def open_gate(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """G0 lets everything pass, as if the batch that it tries seeds on had given each a gradient by chance."""
    with patch.context() as inner:
        inner.setattr("esper_lightning.growth.probe._reasons", lambda slot, trial: [])
        yield
