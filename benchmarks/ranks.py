"""Compare a run in several processes with one in a single process: equality and speed.

    python -m benchmarks.ranks equality [--ranks 2 4] [--executors loop threads fused]
    python -m benchmarks.ranks speed [--config configs/digits.yaml] [--executor fused] [--hosts 96] [--rounds 5]

`equality` trains the same four hosts in one process and in several ones, and compares the first gradient, the policy
after twelve steps, and all hosts. The row `plain DDP` is a run without this project's corrections: each process takes
means, statistics and exploration of its own.

`speed` trains in one process on one core and in two processes on two, in turn, and prints environment steps per second
with their ratio for each round, and where the time of a rollout goes on the first process. Nothing else should run on
the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, Trainer
from torch import Tensor

from esper_lightning.module import TamiyoModule
from esper_lightning.ranks import Moments, Ranks

ROOT = Path(__file__).parent.parent
SMALL = (
    *("--config", "configs/smoke.yaml", "--data.n_envs", "4", "--data.env.horizon", "5", "--trainer.max_epochs", "2"),
    *("--model.ppo.epochs", "3", "--data.env.training.batches", "2", "--model.evaluation.hosts", "0"),
)
"""Four hosts, two updates of three passes of two minibatches."""

SHARE = "time/share."
"""Start of the tags with the share of each phase in the time of a rollout."""


class FirstGradient(Callback):
    """Callback that writes the gradient of the first minibatch, averaged over the ranks, to a file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if trainer.is_global_zero and not self.path.exists():
            parts = [parameter.grad.flatten() for parameter in pl_module.policy.parameters()]
            torch.save(torch.cat(parts), self.path)


class PlainRanks(Ranks):
    """Ranks without the corrections: nothing is shared but the gradients, which DDP averages."""

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        return values.detach().clone()

    def sum_with_gradient(self, values: Tensor) -> Tensor:
        return values

    def moments(self, values: Tensor) -> Moments:
        return Ranks().moments(values)

    def rows(self, of_all: Any, axis: int = 0) -> Any:
        is_noise = isinstance(of_all, Tensor) and of_all.is_floating_point() and of_all.dim() == 2
        return of_all[: len(self.own)] if is_noise else super().rows(of_all, axis)


class PlainDDP(Callback):
    """Callback that removes the corrections from a run."""

    def setup(self, trainer: Trainer, pl_module: TamiyoModule, stage: str) -> None:
        data = trainer.datamodule
        data.ranks = PlainRanks(data.ranks.sizes, data.ranks.rank, data.ranks.world)


class Ending(NamedTuple):
    """Result of one run."""

    gradient: Tensor
    policy: Tensor
    hosts: list[dict[str, Any]]


def fit(folder: Path, ranks: int, *flags: str, cores: Sequence[int] | None = None) -> Path:
    """Train in `ranks` processes, and return the run folder."""
    command = [sys.executable, "-m", "esper_lightning", "fit", *flags, "--trainer.default_root_dir", str(folder)]
    if cores is not None:
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, f"--trainer.devices={ranks}"], cwd=ROOT, env=environment, check=True, capture_output=True)
    return folder / "version_0"


def ending(folder: Path, ranks: int, executor: str, *, plain: bool = False) -> Ending:
    """Train the four hosts and return the result."""
    path = folder / "gradient.pt"
    callbacks = ["--trainer.callbacks+=benchmarks.ranks.FirstGradient", f"--trainer.callbacks.path={path}"]
    callbacks += ["--trainer.callbacks+=benchmarks.ranks.PlainDDP"] if plain else []
    run = fit(folder, ranks, *SMALL, f"--data.env.executor={executor}", *callbacks)
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    policy = [part.double().flatten() for name, part in saved["state_dict"].items() if name.startswith("policy.")]
    return Ending(torch.load(path, weights_only=True), torch.cat(policy), saved["HostPoolData"]["pool"]["envs"])


def same(one: Any, other: Any) -> bool:
    """Return True if two nested states are equal bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def compare_equality(worlds: Sequence[int], executors: Sequence[str]) -> None:
    """Print the table of `equality`."""
    print("| executor | ranks | first gradient | policy after 12 steps | hosts |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for executor in executors:
            alone = ending(Path(name) / executor, 1, executor)
            rows = [(f"{world}", world, False) for world in worlds]
            rows += [(f"{world}, plain DDP", world, True) for world in worlds[:1] if executor == executors[0]]
            for label, world, plain in rows:
                together = ending(Path(name) / f"{executor}{world}{plain}", world, executor, plain=plain)
                hosts = "equal" if same(together.hosts, alone.hosts) else "differ"
                gradient, policy = (
                    distance(getattr(together, at), getattr(alone, at)) for at in ("gradient", "policy")
                )
                print(f"| {executor} | {label} | {gradient:.1e} | {policy:.1e} | {hosts} |", flush=True)


class Speed(NamedTuple):
    """Speed of a run, medians over its rollouts but the first."""

    steps: float
    """Environment steps per second."""
    phases: dict[str, float]
    """Seconds of a rollout by phase, on the first process."""


def compare_speed(config: str, executor: str, hosts: int, rounds: int) -> None:
    """Print environment steps per second of one process on one core and of two on two, with their phases."""
    measured = []
    for number in range(rounds):
        one, two = (measure_speed(config, executor, hosts, len(cores), cores) for cores in ([0], [0, 1]))
        measured.append((one, two))
        ratio = two.steps / one.steps
        print(f"round {number + 1}: {one.steps:.0f} and {two.steps:.0f} steps/s, ratio {ratio:.2f}", flush=True)
    ratios = [two.steps / one.steps for one, two in measured]
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})\n")
    print("| phase | one process | two | ratio |\n|---|--:|--:|--:|")
    for phase in measured[0][0].phases:
        alone, together = (statistics.median(pair[i].phases[phase] for pair in measured) for i in range(2))
        print(f"| {phase} | {alone:.2f} s | {together:.2f} s | {alone / together:.2f} |")


def measure_speed(config: str, executor: str, hosts: int, ranks: int, cores: Sequence[int]) -> Speed:
    """Train four rollouts and return their speed."""
    flags = ("--config", config, f"--data.env.executor={executor}", f"--data.n_envs={hosts}", "--trainer.max_epochs=4")
    flags += ("--model.evaluation.hosts=0", "--trainer.limit_val_batches=0")
    flags += ("--trainer.callbacks+=esper_lightning.callbacks.Telemetry", "--trainer.callbacks.figures_every=0")
    with tempfile.TemporaryDirectory() as name:
        run = fit(Path(name), ranks, *flags, cores=cores)
        # Imported here, because it takes seconds that no other command needs.
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        horizon = int(json.loads((run / "events.jsonl").read_text().splitlines()[0])["horizon"])

    def values(tag: str) -> list[float]:
        return [point.value for point in events.Scalars(tag)[1:]]

    steps = values("time/env_steps_per_second")
    phases = {
        tag.removeprefix(SHARE): statistics.median(
            share * horizon * hosts / speed for share, speed in zip(values(tag), steps, strict=True)
        )
        for tag in events.Tags()["scalars"]
        if tag.startswith(SHARE)
    }
    return Speed(statistics.median(steps), phases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    equality = commands.add_parser("equality")
    equality.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    equality.add_argument("--executors", nargs="+", default=["loop", "threads", "fused"])
    speed = commands.add_parser("speed")
    speed.add_argument("--config", default="configs/digits.yaml")
    speed.add_argument("--executor", default="fused")
    speed.add_argument("--hosts", type=int, default=96, help="of all processes")
    speed.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.command == "equality":
        compare_equality(given.ranks, given.executors)
    else:
        compare_speed(given.config, given.executor, given.hosts, given.rounds)


if __name__ == "__main__":
    main()
