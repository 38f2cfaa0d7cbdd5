"""Change of test accuracy when a seed that learned behind its host is switched on, by task, optimizer and blueprint."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmarks.isolation.hosts import (
    LEARNINGS,
    OPTIMIZERS,
    Case,
    Learning,
    OptimizerChoice,
    TrainedHost,
    correct_predictions,
    draw_epochs,
    grow_in_all_slots,
    make_case,
    train,
    train_host,
)
from benchmarks.rows import appended_rows, read_rows
from esper_lightning.evaluation.statistics import CONFIDENCE
from esper_lightning.growth import blend

TASKS = ("glyphs", "digits", "table")

HOST_EPOCHS = 3
"""Epochs of the host alone."""

SEED_EPOCHS = (1, 3)
"""Epochs of learning after which seeds are measured."""

SLOTS = 3

TOLERANCE = 0.01
"""Loss of accuracy, as a share of the test samples, that counts as harm."""


class Run(NamedTuple):
    """Training of three seeds, one in each slot of a host that has learned alone."""

    task: str
    optimizer: str
    rng_seed: int
    blueprint: str
    isolation: str


class Row(NamedTuple):
    """Numbers of test samples that a host classifies correctly without a seed, and with it fully on."""

    task: str
    optimizer: str
    rng_seed: int
    blueprint: str
    isolation: str
    slot: str
    epochs: int
    samples: int
    right: int  # without the seed
    lost: int  # right without the seed and wrong with it
    gained: int  # wrong without the seed and right with it

    @property
    def run(self) -> Run:
        return Run(self.task, self.optimizer, self.rng_seed, self.blueprint, self.isolation)

    @property
    def change(self) -> float:
        """Change of test accuracy when the seed is switched on, in points of 100."""
        return 100.0 * (self.gained - self.lost) / self.samples

    @property
    def harms(self) -> bool:
        """True if the loss is above one point by a one-sided sign test of the samples that changed (McNemar)."""
        excess = self.lost - self.gained - TOLERANCE * self.samples
        return excess > stats.norm.ppf(CONFIDENCE) * (self.lost + self.gained) ** 0.5


def measure(path: Path, rng_seeds: list[int], tasks: list[str]) -> None:
    """Measure all runs that the file has not got yet; the rows of each run are appended when it ends."""
    rows = read_rows(path, Row)
    counts = {run: sum(row.run == run for row in rows) for run in {row.run for row in rows}}
    complete = {run for run, count in counts.items() if count == SLOTS * len(SEED_EPOCHS)}
    path.unlink(missing_ok=True)
    with appended_rows(path, Row) as append:
        append([row for row in rows if row.run in complete])  # an interrupted process leaves part of a run
        for task in tasks:
            case = make_case(task)
            for rng_seed, optimizer in product(rng_seeds, OPTIMIZERS):
                wanted = [
                    (blueprint, learning)
                    for blueprint, learning in product(case.blueprints, LEARNINGS)
                    if Run(task, optimizer.name, rng_seed, blueprint, learning.name) not in complete
                ]
                if not wanted:
                    continue
                host = train_host(case, optimizer, rng_seed, draw_epochs(case, rng_seed, HOST_EPOCHS))
                for blueprint, learning in wanted:
                    run = Run(task, optimizer.name, rng_seed, blueprint, learning.name)
                    append(grow_and_measure(host, case, optimizer, run=run, learning=learning))
                    print(*run, flush=True)


def grow_and_measure(
    host: TrainedHost, case: Case, optimizer: OptimizerChoice, *, run: Run, learning: Learning
) -> Iterator[Row]:
    """Yield the rows of a run, which trains a copy of `host` with a new seed in every slot."""
    blend.PROXIMAL_STEP = learning.proximal_step
    growing = grow_in_all_slots(host, optimizer, run.blueprint, isolation=learning.isolation, rng_seed=run.rng_seed)
    epochs = draw_epochs(case, run.rng_seed, HOST_EPOCHS + max(SEED_EPOCHS))
    for epoch, batches in enumerate(epochs[HOST_EPOCHS:], 1):
        train(growing, case, batches)
        if epoch in SEED_EPOCHS:
            off, *each_on = correct_predictions(growing.module, case)
            for slot, on in zip(growing.slots, each_on, strict=True):
                lost, gained = int((off & ~on).sum()), int((on & ~off).sum())
                yield Row(*run, slot, epoch, len(off), right=int(off.sum()), lost=lost, gained=gained)


def table(rows: list[Row]) -> list[str]:
    """Return two Markdown tables: all hosts by isolation, and by task and optimizer after the last epoch."""
    lines = ["| isolation | epochs of learning | mean change | range | more than one point worse | beyond chance |"]
    lines += ["|---|---|---|---|---|---|"]
    for learning, epochs in product(LEARNINGS, SEED_EPOCHS):
        own = [row for row in rows if row.isolation == learning.name and row.epochs == epochs]
        if own:
            mean, error = mean_over_hosts(own)
            lines.append(f"| {learning.name} | {epochs} | {mean:+.2f} ± {error:.2f} | {counts(own)} |")
    lines += ["", "| task | optimizer | isolation | accuracy | mean change | range | worse | beyond chance |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for task, optimizer, learning in product(TASKS, OPTIMIZERS, LEARNINGS):
        own = [
            row
            for row in rows
            if (row.task, row.optimizer, row.isolation) == (task, optimizer.name, learning.name)
            and row.epochs == max(SEED_EPOCHS)
        ]
        if own:
            accuracy = 100.0 * np.mean([row.right / row.samples for row in own])
            mean = np.mean([row.change for row in own])
            lines.append(
                f"| {task} | {optimizer.name} | {learning.name} | {accuracy:.1f} | {mean:+.2f} | {counts(own)} |"
            )
    return lines


def mean_over_hosts(rows: list[Row]) -> tuple[float, float]:
    """Return the mean change and half of its 95 % interval (Student's t): seeds of one host are not independent."""
    by_host: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        by_host.setdefault((row.task, row.optimizer, row.rng_seed), []).append(row.change)
    means = [float(np.mean(changes)) for changes in by_host.values()]
    quantile = stats.t.ppf((1.0 + CONFIDENCE) / 2.0, len(means) - 1)
    return float(np.mean(means)), float(quantile * np.std(means, ddof=1) / len(means) ** 0.5)


def counts(rows: list[Row]) -> str:
    """Return cells of a table: extremes, seeds more than one point worse, those of them beyond chance."""
    changes = [row.change for row in rows]
    worse = sum(change < -100.0 * TOLERANCE for change in changes)
    return f"{min(changes):+.1f} … {max(changes):+.1f} | {worse} of {len(rows)} | {sum(row.harms for row in rows)}"
