"""How fast each executor trains N hosts, next to the plainest PyTorch program that trains the same hosts one by one.

    make bench-execution
    python benchmarks/execution.py --case digits --hosts 16 --repeats 5 --csv FILE

The raw loop has no seeds, no slots, no validation and no controller: hosts one after the other, minibatch by minibatch.
Every round measures the raw loop and each executor in turn, so that whatever else the machine does meets all of them;
figures are medians over rounds, ratios with their extremes. `train` compares training alone; `tick` is a whole tick of
the application, with validation, counterfactuals, observation, masks and rewards. `other` is the share of a tick that
is neither training nor validation.
"""

import argparse
import csv
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from esper_lightning.blueprints import build_on, names
from esper_lightning.envs import EnvConfig, HostFactory, HostPool
from esper_lightning.envs.actions import Op, to_action
from esper_lightning.envs.execution import EXECUTORS
from esper_lightning.envs.training import HostTraining
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN, GPT
from esper_lightning.tasks import Digits, Split, Task, TaskData

CPU = torch.device("cpu")

BATCHES, BATCH = 8, 32
"""Minibatches in a tick, and samples in each."""


class Noise(Task):
    """Random inputs and targets: speed does not depend on what is learned.

    Args:
        shape: Of one input; one axis: tokens below `classes`.
        classes: Number of outputs.
    """

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        self.shape = tuple(shape)
        self.classes = classes

    def load(self) -> TaskData:
        generator = torch.Generator().manual_seed(0)

        def split(samples: int) -> Split:
            targets = (samples, *self.shape) if len(self.shape) == 1 else (samples,)
            words = torch.randint(self.classes, targets, generator=generator)
            inputs = words if len(self.shape) == 1 else torch.randn(samples, *self.shape, generator=generator)
            return Split(inputs, words)

        return TaskData(split(BATCHES * BATCH), split(2 * BATCH), split(BATCH), self.classes)


class Case(NamedTuple):
    """A kind of host on a kind of data."""

    task: Task
    host: HostFactory
    onednn: bool


def tiny(input_shape: Sequence[int], outputs: int, slots: list[str] | None = None) -> nn.Module:
    """The host of configs/digits.yaml."""
    return CNN(input_shape, outputs, base=4, kernel=1, pools=2, slots=slots, isolate=False, channels_last=False)


def small(input_shape: Sequence[int], outputs: int, slots: list[str] | None = None) -> nn.Module:
    """6,418 parameters."""
    return CNN(input_shape, outputs, slots=slots)


def wide(input_shape: Sequence[int], outputs: int, slots: list[str] | None = None) -> nn.Module:
    """94,762 parameters."""
    return CNN(input_shape, outputs, base=32, slots=slots)


def gpt(input_shape: Sequence[int], outputs: int, slots: list[str] | None = None) -> nn.Module:
    """Four blocks of width 64."""
    return GPT(input_shape, outputs, width=64, blocks=4, heads=4, context=64, slots=slots)


CASES: dict[str, Case] = {
    "digits": Case(Digits(), tiny, onednn=False),
    "16": Case(Noise((3, 16, 16), 10), small, onednn=True),
    "32x8": Case(Noise((3, 32, 32), 10), small, onednn=True),
    "32x32": Case(Noise((3, 32, 32), 10), wide, onednn=True),
    "gpt": Case(Noise((32,), 96), gpt, onednn=True),
}


class RawLoop:
    """N hosts without slots, trained one after the other."""

    def __init__(self, case: Case, data: TaskData, hosts: int) -> None:
        self.case, self.train = case, data.train

        def build() -> nn.Module:
            generator = torch.Generator().manual_seed(0)
            return build_on(CPU, lambda: case.host(data.input_shape, data.classes, slots=[]), generator)

        self.hosts = [build() for _ in range(hosts)]
        self.optimizers = [torch.optim.Adam(host.parameters(), lr=0.001) for host in self.hosts]

    def __call__(self) -> None:
        for host, optimizer in zip(self.hosts, self.optimizers, strict=True):
            for batch in torch.randperm(self.train.samples)[: BATCHES * BATCH].split(BATCH):
                optimizer.zero_grad()
                loss = self.case.task.measure(host(self.train.inputs[batch]), self.train.targets[batch]).loss.mean()
                loss.backward()
                optimizer.step()


def make_pool(case: Case, data: TaskData, hosts: int, executor: str, grown: bool) -> HostPool:
    """A pool whose hosts have no seeds, or (grown) other seeds each, blended in and never judged."""
    training = HostTraining(lr=0.001, batch_size=BATCH, batches=BATCHES, max_grad_norm=None, onednn=case.onednn)
    lifecycle = LifecycleConfig(auto_cull=False)
    config = EnvConfig(horizon=10**6, executor=executor, training=training, lifecycle=lifecycle)
    pool = HostPool(case.task, data, case.host, config, hosts, CPU)
    for i, env in enumerate(pool.envs if grown else ()):
        for k, slot in enumerate(env.slots):
            choices = names(slot.layout, CPU)
            if (i + k) % 2 == 0:
                env.growing.germinate(slot.name, choices[(i // 2 + k) % len(choices)])
                for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY):
                    slot.move_to(stage)
    pool.clock.take()
    return pool


class Round(NamedTuple):
    """Seconds of one tick."""

    tick: float
    train: float
    validate: float


def step(pool: HostPool) -> Round:
    """One tick in which every host is left alone."""
    wait = to_action([(Op.WAIT,)] * pool.n_envs, pool.device)
    tick = seconds(lambda: pool.step(wait))
    phases = pool.clock.take()
    return Round(tick, phases["train"], phases["validate"])


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


HEADINGS = ("case", "hosts", "seeds", "executor", "env_steps_per_s", "images_per_s", "train_ratio", "train_low",
            "train_high", "tick_ratio", "other_share", "peak_mib")  # fmt: skip


def measure(name: str, hosts: int, repeats: int) -> list[dict[str, object]]:
    """Every executor on one case."""
    case = CASES[name]
    data = case.task.load()
    raw = RawLoop(case, data, hosts)
    pools = {
        (executor, seeds): make_pool(case, data, hosts, executor, grown=seeds == "different")
        for executor in EXECUTORS
        for seeds in ("none", "different")
    }
    raw()
    for pool in pools.values():
        step(pool)
    times: dict[tuple[str, str], list[tuple[float, Round]]] = {key: [] for key in pools}
    for _ in range(repeats):
        plain = seconds(raw)
        for key, pool in pools.items():
            times[key].append((plain, step(pool)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = []
    for (executor, seeds), rounds in times.items():
        ratios = [plain / spent.train for plain, spent in rounds]
        tick = median(spent.tick for _, spent in rounds)
        figures = (
            hosts / tick,
            hosts * BATCHES * BATCH / median(spent.train for _, spent in rounds),
            *(median(ratios), min(ratios), max(ratios)),
            median(plain / spent.tick for plain, spent in rounds),
            median(1.0 - (spent.train + spent.validate) / spent.tick for _, spent in rounds),
            peak,
        )
        rows.append(dict(zip(HEADINGS, (name, hosts, seeds, executor, *figures), strict=True)))
    return rows


def show(row: dict[str, object]) -> str:
    """A row of the table."""
    return (
        "{case:7} {hosts:5} {seeds:9} {executor:8} {env_steps_per_s:8.1f} {images_per_s:9.0f}  {train_ratio:5.2f} "
        "({train_low:.2f} … {train_high:.2f}) {tick_ratio:6.2f} {other_share:6.1%} {peak_mib:6.0f}"
    ).format(**row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="one kind of host; without it, all")
    parser.add_argument("--hosts", type=int, help="number N of hosts; without it 1, 4, 16, 64")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of measurement")
    parser.add_argument("--csv", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("case    hosts seeds     executor  steps/s  images/s  train / raw loop        tick  other    MiB")
    rows = []
    for case in [args.case] if args.case else CASES:
        for hosts in [args.hosts] if args.hosts else (1, 4, 16, 64):
            for row in measure(case, hosts, args.repeats):
                print(show(row), flush=True)
                rows.append(row)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, HEADINGS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
