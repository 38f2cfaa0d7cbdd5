"""Measure what a seed that learned behind the host is worth when it is switched on, and what learning costs.

    python -m benchmarks.isolation worth --out benchmarks/results/isolation.csv
    python -m benchmarks.isolation table
    python -m benchmarks.isolation cost

`worth` trains a host for some epochs, then with a new seed behind each of its three pools, one blueprint at a time.
After each epoch it measures test accuracy with no seed and with each seed alone at full alpha. A row is one seed after
one epoch; the host is the same in all rows of a task and RNG seed.

`table` prints the rows of the page `docs/results/isolation.md` from the kept results.

`cost` measures the processor time of a tick with learning seeds in all slots, relative to isolation straight_through
in the same run; the isolations take turns, and the numbers are medians and quartiles.
"""

import argparse
import csv
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from statistics import mean, median, quantiles, stdev
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import EnvConfig, HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth import GrowingNetwork, LifecycleConfig, blend, measure_variants
from esper_lightning.growth.blend import Isolation
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.tasks import Digits, Glyphs, TaskData

RESULTS = Path(__file__).parent / "results" / "isolation.csv"

BLUEPRINTS = ("conv_heavy", "conv_light", "bottleneck")
SLOTS = ("block1.pool", "block2.pool", "block3.pool")

HOST_EPOCHS, SEED_EPOCHS = 3, 3
"""Epochs of the host alone, and with learning seeds."""


class Learning(NamedTuple):
    """How seeds learn before they are blended."""

    name: str
    isolation: Isolation
    proximal_step: float = blend.PROXIMAL_STEP


LEARNINGS = (
    Learning("straight_through", "straight_through"),
    Learning("proximal .1", "proximal", 0.1),
    Learning("proximal .3", "proximal", 0.3),
    Learning("proximal 1", "proximal", 1.0),
    Learning("trial", "trial"),
)


class Case(NamedTuple):
    """Data and batches of a task."""

    data: TaskData
    batch_size: int
    samples: int  # training samples in an epoch


def make_cases() -> dict[str, Case]:
    """Return the tasks by name."""
    glyphs = Glyphs(train=40_000, validation=1, test=4_000).load()
    return {"glyphs": Case(glyphs, 128, 10_000), "digits": Case(Digits().load(), 32, 897)}


def epochs(case: Case, rng_seed: int) -> Iterator[list[Tensor]]:
    """Yield the minibatches of indices of each epoch, without end; samples are used once before any is used again."""
    generator, left = torch.Generator().manual_seed(rng_seed), torch.empty(0, dtype=torch.int64)
    while True:
        if len(left) < case.samples:
            left = torch.cat([left, torch.randperm(case.data.train.samples, generator=generator)])
        chosen, left = left[: case.samples], left[case.samples :]
        yield [part for part in chosen.split(case.batch_size) if len(part) == case.batch_size]


def train(growing: GrowingNetwork, case: Case, batches: Sequence[Tensor]) -> None:
    """Train network and seeds for one epoch."""
    growing.module.train()
    inputs, targets = case.data.train
    for indices in batches:
        growing.optimizer.zero_grad()
        growing.backward(lambda network, indices=indices: F.cross_entropy(network(inputs[indices]), targets[indices]))
        growing.optimizer.step()


def accuracies(network: nn.Module, case: Case) -> list[float]:
    """Return test accuracy in points of 100 with no seed, then with the seed in each slot alone at full alpha."""
    test = case.data.test
    variants = [frozenset[str](), *(frozenset({slot}) for slot in SLOTS)]
    batches = zip(test.inputs.split(500), test.targets.split(500), strict=True)
    scores = measure_variants(network, variants, batches, score=lambda out, target: (out.argmax(1) == target).double())
    return (100.0 * scores).tolist()


def grow_and_measure(
    host: nn.Module, optimizer_state: dict[str, Any], case: Case, blueprint: str, *, learning: Learning, rng_seed: int
) -> Iterator[list[float]]:
    """Yield the `accuracies` after each epoch with a new seed in every slot of a copy of `host`."""
    blend.PROXIMAL_STEP = learning.proximal_step
    network = deepcopy(host)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
    optimizer.load_state_dict(deepcopy(optimizer_state))
    lifecycle = LifecycleConfig(isolation=learning.isolation)
    growing = GrowingNetwork(
        network,
        optimizer,
        horizon=HOST_EPOCHS + SEED_EPOCHS,
        lifecycle=lifecycle,
        generator=torch.Generator().manual_seed(rng_seed),
    )
    for slot in SLOTS:
        growing.germinate(slot, blueprint)
    order = epochs(case, rng_seed)
    for _ in range(HOST_EPOCHS):
        next(order)
    for _ in range(SEED_EPOCHS):
        train(growing, case, next(order))
        yield accuracies(network, case)


def worth(rng_seeds: Sequence[int], out: Path) -> None:
    """Measure all learnings, blueprints and tasks; rows go to `out` as they come."""
    with out.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["task", "isolation", "blueprint", "slot", "epochs", "seed", "off", "on"])
        cases = make_cases()
        for rng_seed in rng_seeds:
            for task, case in cases.items():
                torch.manual_seed(rng_seed)
                host = CNN(case.data.input_shape, case.data.classes, slots=list(SLOTS))
                growing = GrowingNetwork(host, torch.optim.Adam(host.parameters(), lr=0.003), horizon=HOST_EPOCHS)
                order = epochs(case, rng_seed)
                for _ in range(HOST_EPOCHS):
                    train(growing, case, next(order))
                state = growing.optimizer.state_dict()
                for blueprint in BLUEPRINTS:
                    for learning in LEARNINGS:
                        measured = grow_and_measure(host, state, case, blueprint, learning=learning, rng_seed=rng_seed)
                        for epoch, (off, *on) in enumerate(measured, 1):
                            for slot, value in zip(SLOTS, on, strict=True):
                                rows.writerow(
                                    [
                                        task,
                                        learning.name,
                                        blueprint,
                                        slot,
                                        epoch,
                                        rng_seed,
                                        f"{off:.2f}",
                                        f"{value:.2f}",
                                    ]
                                )
                        file.flush()


class Changes(NamedTuple):
    """Changes of test accuracy, in points of 100, when seeds are switched on; one task, isolation and epoch."""

    values: list[float]

    def __str__(self) -> str:
        """Return cells of a Markdown table: mean with its standard error, extremes, cases worse than one point."""
        error = stdev(self.values) / len(self.values) ** 0.5
        worse = sum(value < -1.0 for value in self.values)
        return (
            f"{mean(self.values):+.2f} ± {error:.2f} | {min(self.values):+.2f} … {max(self.values):+.2f} | "
            f"{worse} of {len(self.values)}"
        )


def table(path: Path) -> list[str]:
    """Return the rows of a Markdown table of the kept results."""
    changes: dict[tuple[str, str, str], list[float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            change = float(row["on"]) - float(row["off"])
            changes.setdefault((row["task"], row["isolation"], row["epochs"]), []).append(change)
    return [f"| {' | '.join(key)} | {Changes(values)} |" for key, values in changes.items()]


def learning_pool(isolation: Isolation, executor: str) -> HostPool:
    """Return a pool of four hosts with a learning seed in every slot."""
    task = Digits()
    config = EnvConfig(
        executor=executor,
        training=HostTraining(batches=8, onednn=False),
        lifecycle=LifecycleConfig(isolation=isolation, training_ticks=10_000),
    )

    def host(input_shape: Sequence[int], outputs: int) -> nn.Module:
        return CNN(input_shape, outputs, slots=list(SLOTS))

    pool = HostPool(task, task.load(), host, config=config, n_envs=4, device=torch.device("cpu"))
    for env in pool.envs:
        for slot in SLOTS:
            env.growing.germinate(slot, "conv_light")
            env.growing.slots[slot].move_to(Stage.TRAINING)
    return pool


def cost(repeats: int) -> None:
    """Print the processor time of training and validation, relative to straight_through."""
    print("executor isolation          median (quartiles)")
    for executor in ("loop", "fused"):
        isolations = [name for name in get_args(Isolation) if executor == "loop" or name != "trial"]
        pools = {name: learning_pool(name, executor) for name in isolations}
        seconds: dict[str, list[float]] = {name: [] for name in isolations}
        for repeat in range(repeats + 1):
            for name, pool in pools.items():
                begin = time.process_time()
                pool.executor.train_and_validate(pool.envs, pool.data.train, pool.data.validation, clock=pool.clock)
                if repeat:  # the first tick warms up
                    seconds[name].append(time.process_time() - begin)
        for name in isolations:
            ratios = [a / b for a, b in zip(seconds[name], seconds["straight_through"], strict=True)]
            low, _, high = quantiles(ratios)
            print(f"{executor:8} {name:18} {median(ratios):6.3f} ({low:.3f} … {high:.3f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    worth_parser = commands.add_parser("worth")
    worth_parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    worth_parser.add_argument("--out", type=Path, required=True)
    commands.add_parser("table")
    cost_parser = commands.add_parser("cost")
    cost_parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "worth":
        worth(arguments.seeds, arguments.out)
    elif arguments.command == "table":
        print("\n".join(table(RESULTS)))
    else:
        cost(arguments.repeats)


if __name__ == "__main__":
    main()
