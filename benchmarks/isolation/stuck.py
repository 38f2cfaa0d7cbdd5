"""How often the gradient of a seed that learns behind its host keeps it from being blended, by blueprint and rate."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.isolation.hosts import (
    Case,
    OptimizerChoice,
    TrainedHost,
    draw_epochs,
    grow_in_all_slots,
    make_case,
    train,
    train_host,
)
from benchmarks.rows import appended_rows, read_rows
from esper_lightning.growth.blend import Isolation
from esper_lightning.growth.gates import reasons_against_gradient

BLUEPRINTS = ("norm", "attention", "conv_small", "depthwise", "bottleneck", "conv_light", "conv_heavy")

RATES = (0.003, 0.01, 0.02)
"""Learning rates of Adam."""

ISOLATIONS: tuple[Isolation, ...] = ("straight_through", "proximal", "trial")

HOST_EPOCHS = 3

JUDGED_AFTER = (3, 4, 5, 6)
"""Epochs of the seed after which the gate is asked."""

SAMPLES = 897
"""Training samples in an epoch: 28 minibatches."""


class Run(NamedTuple):
    """Training of three seeds, one in each slot of a host that has learned alone."""

    isolation: Isolation
    blueprint: str
    lr: float
    rng_seed: int


class Row(NamedTuple):
    """Verdicts on one seed."""

    isolation: str
    blueprint: str
    lr: float
    rng_seed: int
    slot: str
    passes: int  # epochs in `JUDGED_AFTER` at which its gradient is healthy
    tensors: int
    vanished: int  # tensors without a gradient after the last epoch
    exploded: int


def measure(path: Path, rng_seeds: list[int]) -> None:
    """Measure all runs that the file has not got yet; the rows of each run are appended when it ends."""
    known = {(row.isolation, row.blueprint, row.lr, row.rng_seed) for row in read_rows(path, Row)}
    case = make_case("digits")._replace(samples=SAMPLES)
    with appended_rows(path, Row) as append:
        for rng_seed, lr in product(rng_seeds, RATES):
            wanted = [
                run
                for blueprint, isolation in product(BLUEPRINTS, ISOLATIONS)
                if (run := Run(isolation, blueprint, lr, rng_seed)) not in known
            ]
            if wanted:
                optimizer = OptimizerChoice(f"adam {lr:g}", torch.optim.Adam, {"lr": lr})
                epochs = draw_epochs(case, rng_seed, HOST_EPOCHS + max(JUDGED_AFTER))
                host = train_host(case, optimizer, rng_seed, epochs[:HOST_EPOCHS])
                for run in wanted:
                    append(grow_and_judge(host, case, optimizer, run=run))
                    print(*run, flush=True)


def grow_and_judge(host: TrainedHost, case: Case, optimizer: OptimizerChoice, *, run: Run) -> Iterator[Row]:
    """Yield the rows of a run, which trains a copy of `host` with a new seed in every slot."""
    growing = grow_in_all_slots(host, optimizer, run.blueprint, isolation=run.isolation, rng_seed=run.rng_seed)
    epochs = draw_epochs(case, run.rng_seed, HOST_EPOCHS + max(JUDGED_AFTER))[HOST_EPOCHS:]
    passes = dict.fromkeys(growing.slots, 0)
    for epoch, batches in enumerate(epochs, 1):
        train(growing, case, batches)
        growing.end_epoch()
        for slot in growing.slots:
            reasons = reasons_against_gradient(growing.evidence(slot), growing.lifecycle)
            passes[slot] += epoch in JUDGED_AFTER and not reasons
    for name, slot in growing.slots.items():
        gradient, tensors = growing.measurements[name].gradient, len(list(slot.seed.parameters()))
        assert gradient is not None, "the seed has just learned"
        yield Row(
            *run,
            slot=name,
            passes=passes[name],
            tensors=tensors,
            vanished=round(tensors * gradient.vanished),
            exploded=round(tensors * gradient.exploded),
        )


def table(rows: list[Row]) -> list[str]:
    """Return a Markdown table of the number of seeds whose gradient is never healthy, by isolation and rate."""
    columns = list(product(ISOLATIONS, RATES))
    heading = " | ".join(f"{isolation}, {lr:g}" for isolation, lr in columns)
    lines = [f"| blueprint | {heading} |", "|---" * (1 + len(columns)) + "|"]
    for blueprint in BLUEPRINTS:
        cells = []
        for isolation, lr in columns:
            own = [row for row in rows if (row.blueprint, row.isolation, row.lr) == (blueprint, isolation, lr)]
            cells.append(f"{sum(row.passes == 0 for row in own)} of {len(own)}")
        lines.append(f"| {blueprint} | {' | '.join(cells)} |")
    return lines
