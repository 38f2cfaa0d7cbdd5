"""Several processes of one run: equality with one process, speed, and what the parts of a tick cost.

    python -m benchmarks.ranks equality [--ranks 2 4] [--executors loop threads fused]
    python -m benchmarks.ranks speed [--config configs/digits.yaml] [--executor fused] [--hosts 96] [--rounds 5]
    python -m benchmarks.ranks costs

`equality` trains the same four hosts in one process and in several ones, and compares the first gradient, the policy
after twelve steps, and all hosts. The row `plain DDP` is a run without this project's corrections: each process takes
means, statistics and exploration of its own.

`speed` trains in one process on one core and in two processes on two, in turn, and prints environment steps per second
with their ratio for each round, and where the time of a rollout goes on the first process. Nothing else should run on
the machine.

`costs` measures the constants of the cost model in docs/development/scale.md, and prints its predictions.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning import Callback, Trainer
from torch import Tensor

from esper_lightning.checkpointing.atomic_io import check_space
from esper_lightning.envs.packing import pack, unpack
from esper_lightning.module import TamiyoModule
from esper_lightning.ranks import Moments, Ranks, pack_state, unpack_state

ROOT = Path(__file__).parent.parent
SMALL = (
    *("--config", "configs/smoke.yaml", "--data.n_envs", "4", "--data.env.horizon", "5", "--trainer.max_epochs", "2"),
    *("--model.ppo.epochs", "3", "--data.env.training.batches", "2", "--evaluation.hosts", "0"),
)
"""Four hosts, two updates of three passes of two minibatches."""

PORT = 29473
SHARE = "time/share."
"""Start of the tags with the share of each phase in the time of a rollout."""

SAVES = 5
"""Checkpoints of which the median time is taken."""

REDUCED_BYTES = (8, 2**10, 2**16, 2**20, 2**23)
"""Sizes of the measured reductions in bytes."""


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
    callbacks = [{"class_path": "benchmarks.ranks.FirstGradient", "init_args": {"path": str(path)}}]
    if plain:
        callbacks.append({"class_path": "benchmarks.ranks.PlainDDP"})
    run = fit(folder, ranks, *SMALL, f"--data.env.executor={executor}", "--trainer.callbacks", json.dumps(callbacks))
    saved = torch.load(run / "checkpoints" / "latest.ckpt", weights_only=True)
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
    # `best` saves after each of the first rollouts, which is seldom the case later.
    flags += ("--evaluation.hosts=0", "--telemetry.figures_every=0", "--best.every_n_epochs=1000")
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


class Costs(NamedTuple):
    """Constants of the cost model: seconds, and bytes."""

    host_tick: float
    """Seconds of one host in one tick, all work on it included."""
    policy_row: float
    """Seconds of the policy's step for one host."""
    update_row: float
    """Seconds of one host's sequence in one minibatch of an update, backward pass included."""
    latency: float
    """Seconds of a reduction of a few bytes between two ranks."""
    byte: float
    """Seconds per byte of a large reduction."""
    record: float
    """Seconds of one gather of a small record to rank 0, for each rank."""
    host_bytes: float
    """Bytes of one host in a checkpoint."""
    host_state: float
    """Seconds of copying the state of one host, on its own process."""
    saved_byte: float
    """Seconds per byte of a checkpoint: gathered, joined, sized and written."""


class Prediction(NamedTuple):
    """Seconds of one rollout by part."""

    ticks: float
    update: float
    reductions: float
    telemetry: float
    checkpoint: float

    @property
    def efficiency(self) -> float:
        """Share of the time in which hosts train."""
        return self.ticks / sum(self)


def predict(
    costs: Costs, hosts: int, ranks: int, *, parameters: int = 200_000, horizon: int = 12, minibatches: int = 24
) -> Prediction:
    """Return the seconds of one rollout.

    Args:
        costs: Measured constants.
        hosts: Hosts of all ranks.
        ranks: Processes.
        parameters: Parameters of the policy.
        horizon: Ticks of a rollout.
        minibatches: Minibatches of an update, over all passes.
    """
    own = hosts / ranks
    rounds = max(1, ranks - 1).bit_length()  # messages that follow each other in a reduction
    gradient = rounds * costs.latency + 2 * 4 * parameters * costs.byte * (ranks - 1) / ranks
    passes = 6
    return Prediction(
        ticks=horizon * own * (costs.host_tick + costs.policy_row),
        update=passes * own * costs.update_row,
        reductions=(minibatches * (gradient + 2 * rounds * costs.latency) + 2 * horizon * rounds * costs.latency)
        * (ranks > 1),
        telemetry=horizon * 2 * ranks * costs.record * (ranks > 1),
        checkpoint=own * costs.host_state + hosts * costs.host_bytes * costs.saved_byte,
    )


def measure_costs() -> Costs:
    """Measure the constants with the hosts of configs/digits.yaml and two gloo processes on this machine."""
    reductions = _in_two_processes(_time_reductions)
    sizes, seconds = zip(*reductions[:-1], strict=True)
    per_byte = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    with tempfile.TemporaryDirectory() as name:
        run = fit(Path(name), 1, "--config", "configs/digits.yaml", "--trainer.max_epochs=3", "--evaluation.hosts=0")
        path = run / "checkpoints" / "latest.ckpt"
        saved = torch.load(path, weights_only=True)
        envs = saved["HostPoolData"]["pool"]["envs"]
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        horizon = int(json.loads((run / "events.jsonl").read_text().splitlines()[0])["horizon"])

        def last(tag: str) -> float:
            return events.Scalars(tag)[-1].value

        rollout = horizon / last("time/ticks_per_second")
        policy, update = (rollout * last(f"time/share.{phase}") for phase in ("policy", "update"))
        copies, durations = [], []
        for _ in range(SAVES):
            states = [unpack(env) for env in envs]
            start = time.perf_counter()
            envs = [pack(state) for state in states]
            copies.append(time.perf_counter() - start)
            start = time.perf_counter()
            content = pack_state(envs)
            envs = unpack_state(content)
            check_space(envs, path)
            with (Path(name) / "copy.pt").open("wb") as copy:
                torch.save(envs, copy)
                copy.flush()
                os.fsync(copy.fileno())
            durations.append(time.perf_counter() - start)
    return Costs(
        host_tick=(rollout - policy - update) / horizon / len(envs),
        policy_row=policy / horizon / len(envs),
        update_row=update / len(envs) / 6,
        latency=seconds[0],
        byte=per_byte,
        record=reductions[-1][1],
        host_bytes=len(content) / len(envs),
        host_state=statistics.median(copies) / len(envs),
        saved_byte=statistics.median(durations) / len(content),
    )


def _in_two_processes(work: Callable[[], list[tuple[int, float]]]) -> list[tuple[int, float]]:
    context = get_context("fork")
    queue = context.SimpleQueue()

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=2)
        found = work()
        if rank == 0:
            queue.put(found)
        dist.destroy_process_group()

    processes = [context.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    found = queue.get()
    for process in processes:
        process.join()
    return found


def _time_reductions() -> list[tuple[int, float]]:
    """Return bytes and median seconds of reductions, and last those of the gather of a small record."""
    found = []
    for size in REDUCED_BYTES:
        values = torch.zeros(size // 4)
        found.append((size, _median_seconds(lambda values=values: dist.all_reduce(values))))
    ranks = Ranks([2], dist.get_rank(), 2)
    return [*found, (0, _median_seconds(lambda: ranks.gather({"objective": 0.5})))]


def _median_seconds(work: Callable[[], object], times: int = 50) -> float:
    seconds = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def show_costs() -> None:
    """Print the measured constants and the predictions."""
    costs = measure_costs()
    for name, value in costs._asdict().items():
        print(f"{name}: {value:.3g}")
    print("| hosts | ranks | ticks | update | reductions | telemetry | checkpoint | share of ticks |")
    print("|---|---|---|---|---|---|---|---|")
    fast = costs._replace(
        host_tick=costs.host_tick / 10, policy_row=costs.policy_row / 10, update_row=costs.update_row / 10
    )
    sizes = ((48, 1), (48, 2), (512, 8), (4096, 64), (9984, 64))
    rows = [(f"{hosts:,}", costs, hosts, ranks) for hosts, ranks in sizes]
    rows += [(f"{hosts:,}, ten times as fast", fast, hosts, ranks) for hosts, ranks in ((512, 8), (9984, 64))]
    for label, seconds_of, hosts, ranks in rows:
        seconds = predict(seconds_of, hosts, ranks)
        cells = " | ".join(f"{part:.2g} s" for part in seconds)
        print(f"| {label} | {ranks} | {cells} | {seconds.efficiency:.2f} |")


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
    commands.add_parser("costs")
    given = parser.parse_args()
    if given.command == "equality":
        compare_equality(given.ranks, given.executors)
    elif given.command == "speed":
        compare_speed(given.config, given.executor, given.hosts, given.rounds)
    else:
        show_costs()


if __name__ == "__main__":
    main()
