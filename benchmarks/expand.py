"""A trained GPT of three blocks as the start of a training: go on, expand it, or begin anew, at equal training FLOPs.

    python -m benchmarks.expand run      # make the trainings that the results lack
    python -m benchmarks.expand table    # docs/methods/expand.md

The small network (width 32, 64 bytes of text) is trained on the source of the Python installation. The second
training is on more of that text, or on the Python language reference, with a share of the FLOPs of the first one.

Rows: `small` goes on with three blocks. `expand` adds a block behind each one that changes no output at first, by
`growth.stack` with `new="zero", zero="auto"`; `new alone` trains these, with `freeze="old"`. `copy` adds copies.
`three anew` and `six anew` begin with random weights. AdamW; the learning rate warms up over 100 steps, is constant,
and falls to 0 over the last fifth of the steps. Each row has the best of its learning rates, by the validation loss on
the text of the second training at RNG seed 0; test losses on both texts; intervals by Student's t over RNG seeds.
"""

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.depth import VALIDATED, LitNet, evaluate, fit, loss_of, make_gpt, t_interval
from benchmarks.rows import appended_rows, read_rows
from esper_lightning.envs.flops import FlopCounter
from esper_lightning.growth import stack
from esper_lightning.tasks import Source, Text
from esper_lightning.tasks.task import TaskData

RESULTS = Path(__file__).parent / "results" / "expand.csv"
LENGTH, WIDTH, BATCH, SMALL = 64, 32, 4, 3
FIRST_STEPS, FIRST_RATE = 4_000, 0.005
SHARES = (0.125, 0.5)
"""FLOPs of the second training, in those of the first one."""
RATES = (0.000625, 0.00125, 0.0025, 0.005, 0.01, 0.02)
ROWS = ("small", "expand", "new alone", "copy", "three anew", "six anew")
SEEDS = 4
TESTED = 512
"""Largest number of test samples."""


class Row(NamedTuple):
    """Losses at the end of a second training, in nats per byte."""

    text: str
    share: float
    row: str
    rate: float
    seed: int
    steps: int
    validation: float
    test: float
    test_first: float
    """Test loss on the text of the first training."""


@cache
def text(name: str) -> TaskData:
    return {"source": Source, "english": Text}[name](length=LENGTH).load()


def train(net: nn.Module, name: str, steps: int, rate: float, seed: int) -> None:
    fit(LitNet(net, steps, rate), text(name).train, BATCH, seed)


def step_flops(net: nn.Module) -> int:
    """Return the FLOPs of one training step of what can learn."""
    split = text("source").train
    with FlopCounter() as counter:
        loss_of(net, split.inputs[:BATCH], split.targets[:BATCH]).backward()
    net.zero_grad()
    return counter.total


@cache
def trained_small(seed: int) -> dict[str, Tensor]:
    """Return the weights of the small network after the first training."""
    torch.manual_seed(seed)
    net = make_gpt(SMALL, WIDTH, LENGTH)
    train(net, "source", FIRST_STEPS, FIRST_RATE, seed)
    return net.state_dict()


def second(row: str, seed: int) -> nn.Module:
    """Return the network with which a second training begins."""
    torch.manual_seed(1000 + seed)
    net = make_gpt(2 * SMALL if row == "six anew" else SMALL, WIDTH, LENGTH)
    if "anew" in row:
        return net
    net.load_state_dict(trained_small(seed))
    if row == "copy":
        stack(net, "blocks", to=2 * SMALL, order="interleave")
    elif row != "small":
        example = text("source").train.inputs[:BATCH]
        content: Any = {"new": "zero", "zero": "auto", "example": example}
        stack(net, "blocks", to=2 * SMALL, order="interleave", freeze="old" if row == "new alone" else None, **content)
    return net


def measure(name: str, share: float, row: str, rate: float, seed: int) -> Row:
    net = second(row, seed)
    steps = round(share * FIRST_STEPS * step_flops(make_gpt(SMALL, WIDTH, LENGTH)) / step_flops(net))
    train(net, name, steps, rate, 100 + seed)
    validation = evaluate(net, text(name).validation, VALIDATED)
    tests = [evaluate(net, text(each).test, TESTED) for each in (name, "source")]
    return Row(name, share, row, rate, seed, steps, validation, *tests)


def best_rate(rows: list[Row], name: str, share: float, row: str) -> float:
    tried = [r for r in rows if (r.text, r.share, r.row, r.seed) == (name, share, row, 0)]
    return min(tried, key=lambda r: r.validation).rate


def run(path: Path) -> None:
    with appended_rows(path, Row) as append:
        for name in ("english", "source"):
            for share in SHARES:
                for row in ROWS:
                    rows = read_rows(path, Row)
                    known = {(r.text, r.share, r.row, r.rate, r.seed) for r in rows}
                    for rate in RATES:
                        if (name, share, row, rate, 0) not in known:
                            append([measure(name, share, row, rate, 0)])
                    rate = best_rate(read_rows(path, Row), name, share, row)
                    for seed in range(1, SEEDS):
                        if (name, share, row, rate, seed) not in known:
                            append([measure(name, share, row, rate, seed)])


def table(rows: list[Row]) -> Iterator[str]:
    yield "| second training | FLOPs | start | rate | loss | ahead of `small` | loss on the first text |"
    yield "|---|--:|---|--:|--:|---|--:|"
    for name, share in dict.fromkeys((r.text, r.share) for r in rows):
        at_best = {
            row: {r.seed: r for r in rows if (r.text, r.share, r.row, r.rate) == (name, share, row, rate)}
            for row in ROWS
            for rate in [best_rate(rows, name, share, row)]
        }
        for row, by_seed in at_best.items():
            leads = [at_best["small"][seed].test - r.test for seed, r in by_seed.items()]
            mean, low, high = t_interval(leads)
            told = "" if row == "small" else f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
            losses = [sum(getattr(r, k) for r in by_seed.values()) / len(by_seed) for k in ("test", "test_first")]
            rate = next(iter(by_seed.values())).rate
            yield f"| {name} | {share:g} | {row} | {rate:g} | {losses[0]:.3f} | {told} | {losses[1]:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "run":
        run(arguments.results)
    else:
        print("\n".join(table(read_rows(arguments.results, Row))))


if __name__ == "__main__":
    main()
