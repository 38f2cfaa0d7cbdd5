"""Growth in depth by the callback `Stack` against networks of a fixed depth: loss at equal FLOPs, FLOPs to equal loss.

    python -m benchmarks.depth run --host gpt16 --budget 25 --rows blocks=1 blocks=2    # best rates, RNG seed 0
    python -m benchmarks.depth run --host gpt16 --budget 25 --rows blocks=3 'Stack("blocks"), blocks=4' --seeds 0 1 2 3
    python -m benchmarks.depth table --host gpt16 --budget 25
    python -m benchmarks.depth picture --host gpt16 --rows blocks=2 blocks=3 'Stack("blocks"), blocks=4'

A row is the line that a user writes: the callback, and the number of blocks that the class builds, six where nothing is
said. `blocks` stands for the host's list, or lists. All training is `Trainer.fit`, in one thread.

run: make the trainings that the results lack. A budget is given in targets (tokens, or labels) for each parameter of
    six blocks, and has the FLOPs of six blocks on so many targets. A fixed depth, or growth after shares of the steps,
    gets the number of steps that costs as much; rows that decide in training get several. The search of the learning
    rate begins with `--rates`, else with the best of the nearest budget, and goes on by factors of 2 until the best one
    has worse ones on both sides, by the validation loss of RNG seed 0; then come the other `--seeds` at that rate.
    With `--compile`, torch.compile compiles the networks: the same trainings, but for roundings, in less time. Those
    that the results have are not made again, compiled or not.
table: test losses of a budget, each row at its best rate; means and 95 % intervals by Student's t over RNG seeds, by
    which leads are paired. Rows that decide in training are interpolated in the log of the FLOPs that they spent. The
    best fixed depth, in bold, has the lowest validation loss among those with most RNG seeds. Equal steps: the lead
    over the final depth from the start. Compute saved, 1 − F′ / F: the best fixed depth has its loss after the budget
    F, and the row after F′ FLOPs, by lines over log F between trainings of several budgets, all with a decay of their
    own; beyond them, marked by *, the outer line goes on.
picture: loss over FLOPs on a host, and compute saved over targets per parameter on all hosts.

Hosts: GPTs on bytes: `gpt16` to `gpt64`, named by their widths, learn the source of the Python installation, `english`
(width 32) the Python language reference, and `headers` (width 48) the C++ headers of torch. `vit` (patches of 4) and
`cnn` (three stages, each as deep as the row says) are on letters at 32×32.
"""

import argparse
import inspect
import logging
import math
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import LightningModule, Trainer
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from torchvision.models.vision_transformer import VisionTransformer

from benchmarks.rows import appended_rows, read_rows, revision
from benchmarks.tables import shown
from esper_lightning.callbacks import Stack
from esper_lightning.callbacks.plans import Shares
from esper_lightning.envs.flops import FlopCounter
from esper_lightning.evaluation.statistics import CONFIDENCE, Interval
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.hosts import GPT
from esper_lightning.tasks import Glyphs, Source, Text
from esper_lightning.tasks.task import Split, TaskData

RESULTS = Path(__file__).parent / "results" / "depth.csv"
WARMUP, DECAY = 100, 0.2
"""Steps of warm-up, and share of the steps over which the learning rate falls to 0."""
VALIDATED, TESTED = 256, 2048
"""Largest numbers of samples of a validation and of the test."""
REFERENCE = 6
"""Number of blocks of the network that defines budgets, and of a row that names none."""
DECIDING = (0.5, 0.7, 1.0)
"""Steps of rows that decide in training, in those of their first depth for the whole budget."""


class ResidualBlock(nn.Module):
    """Pre-norm residual block of convolutions: normalise, widen, GELU, narrow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.widen, self.narrow = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.widen(self.norm(x))))


def make_gpt(depth: int, width: int = 64, length: int = 128) -> nn.Module:
    modern = {"rotary": True, "rms_norm": True, "bias": False}
    gpt = GPT((length,), 256, width=width, blocks=depth, heads=width // 16, context=length, slots=[], **modern)
    gpt.initialise(torch.Generator().manual_seed(torch.initial_seed()))
    return gpt


def make_vit(depth: int) -> nn.Module:
    vit = VisionTransformer(32, 4, depth, 4, hidden_dim=64, mlp_dim=256, num_classes=62)
    vit.conv_proj = nn.Conv2d(1, 64, 4, 4)
    return vit


def make_cnn(depth: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 8, 3, padding=1)]
    for before, width in ((8, 8), (8, 16), (16, 32)):
        layers += [] if before == width else [nn.Conv2d(before, width, 2, stride=2)]
        layers.append(nn.Sequential(*(ResidualBlock(width) for _ in range(depth))))
    end = (nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 62))
    return nn.Sequential(*layers, *end)


class Headers(Text):
    """Next-byte prediction on the C++ headers of the installed torch, in an order that mixes their folders."""

    def _read(self) -> tuple[Tensor, list[int]]:
        files = Path(inspect.getfile(torch)).parent.glob("include/torch/csrc/**/*.h")
        mixed = sorted(files, key=lambda path: (zlib.crc32(path.name.encode()), path))
        stream = torch.frombuffer(bytearray().join(path.read_bytes() for path in mixed), dtype=torch.uint8)
        return stream, [int(share * len(stream)) for share in self.shares]


class Host(NamedTuple):
    """A network that can be built at several depths, with its task."""

    make: Callable[[int], nn.Module]
    lists: tuple[str, ...]  # names of its lists of like blocks
    load: Callable[[], TaskData]
    batch: int  # samples in a minibatch
    rate: float  # learning rate with which a search begins


def gpt_host(task: type[Text], width: int, rate: float, length: int = 64) -> Host:
    load = cache(lambda: task(length=length).load())
    return Host(partial(make_gpt, width=width, length=length), ("blocks",), load, 4, rate)


LETTERS = cache(lambda: Glyphs(32, train=24_000, validation=1_000, test=4_000).load())
HOSTS = {
    "gpt16": gpt_host(Source, 16, 0.01),
    "gpt32": gpt_host(Source, 32, 0.005),
    "gpt64": gpt_host(Source, 64, 0.002, length=128),
    "english": gpt_host(Text, 32, 0.005),
    "headers": gpt_host(Headers, 48, 0.005),
    "vit": Host(make_vit, ("encoder.layers",), LETTERS, 32, 0.001),
    "cnn": Host(make_cnn, ("1", "3", "5"), LETTERS, 32, 0.002),
}


class Result(NamedTuple):
    """One training. Trainings of a cell, the first five fields, differ in learning rate and RNG seed alone."""

    host: str
    tokens: float  # the budget: targets for each parameter of six blocks
    row: str
    optimizer: str
    steps: int
    rate: float
    seed: int
    flops: float  # of all training steps, forward and backward
    depth: int  # at the end
    validation: float
    test: float
    seconds: float  # processor time of `fit`
    revision: str
    date: str
    threads: int
    compiled: int  # 1 if torch.compile has compiled the network


Cell = tuple[str, float, str, str, int]


class Windows(IterableDataset):
    """Endless minibatches of random samples."""

    def __init__(self, split: Split, batch: int, seed: int) -> None:
        self.split, self.batch, self.random = split, batch, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            chosen = torch.randint(self.split.samples, (self.batch,), generator=self.random)
            yield self.split.inputs[chosen], self.split.targets[chosen]


class Joined(Optimizer):
    """Two optimizers that step as one."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        super().__init__(groups := first.param_groups + second.param_groups, {})
        self.param_groups, self.first, self.second = groups, first, second

    def step(self, closure: Any = None) -> Any:
        loss = self.first.step(closure)
        self.second.step()
        return loss


class LitNet(LightningModule):
    """A network with a rate that warms up, stays, and falls to 0; with `by_muon` for the matrices of its blocks."""

    def __init__(self, net: nn.Module, steps: int, rate: float, *, by_muon: bool = False) -> None:
        super().__init__()
        self.net, self.steps, self.rate, self.by_muon = net, steps, rate, by_muon

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.net, *batch)

    def configure_optimizers(self) -> Any:
        learning = {name: x for name, x in self.net.named_parameters() if x.requires_grad}
        matrices = [x for name, x in learning.items() if self.by_muon and name.startswith("blocks.") and x.ndim == 2]
        others = [x for x in learning.values() if all(x is not matrix for matrix in matrices)]
        optimizer: Optimizer = AdamW(others, lr=self.rate, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
        if matrices:
            optimizer = Joined(Muon(matrices, lr=self.rate, adjust_lr_fn="match_rms_adamw"), optimizer)
        scheduler = LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / WARMUP, (1.0 - k / self.steps) / DECAY))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loss_of(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return cross-entropy, the mean over samples and places."""
    outputs = net(inputs if inputs.dtype == torch.uint8 else inputs.float())
    return F.cross_entropy(outputs.flatten(0, -2), targets.long().flatten())


@torch.no_grad()
def evaluate(net: nn.Module, split: Split, most: int) -> float:
    """Return the loss on evenly spaced samples of a split; infinity if it is not a number."""
    net.eval()
    chosen = torch.linspace(0, split.samples - 1, min(most, split.samples)).long()
    losses = [len(part) * loss_of(net, split.inputs[part], split.targets[part]) for part in chosen.split(64)]
    net.train()
    return float(torch.stack(losses).sum().nan_to_num(nan=math.inf) / len(chosen))


def fit(module: LitNet, split: Split, batch: int, seed: int, *, stacks: Sequence[Stack] = ()) -> None:
    plain: dict[str, Any] = {"accelerator": "cpu", "barebones": True}  # neither bar, checkpoints, nor loggers
    trainer = Trainer(max_steps=module.steps, gradient_clip_val=1.0, callbacks=list(stacks), **plain)
    trainer.fit(module, DataLoader(Windows(split, batch, seed), batch_size=None))


def parse(host: str, row: str) -> tuple[int, list[Stack]]:
    """Return how many blocks the class builds in a row, and its callbacks, one for each list of the host."""

    def line(stack: Stack | None = None, blocks: int = REFERENCE) -> tuple[int, Stack | None]:
        return blocks, stack

    texts = [row.replace('"blocks"', f'"net.{name}"') for name in HOSTS[host].lists]
    lines = [eval(f"line({text})", {"line": line, "Stack": Stack}) for text in texts]
    return lines[0][0], [stack for _, stack in lines if stack is not None]


@cache
def count_step(host: str, blocks: int) -> tuple[int, int]:
    """Return the FLOPs of one training step, forward and backward, and its targets."""
    net, split, batch = HOSTS[host].make(blocks), HOSTS[host].load().train, HOSTS[host].batch
    with FlopCounter() as counter:
        loss_of(net, split.inputs[:batch], split.targets[:batch]).backward()
    return counter.total, counter.targets


def budget_of(host: str, tokens: float) -> float:
    """Return the FLOPs of six blocks on so many targets for each of their parameters."""
    flops, targets = count_step(host, REFERENCE)
    return tokens * count_parameters(HOSTS[host].make(REFERENCE)) / targets * flops


@cache
def lengths(host: str, tokens: float, row: str) -> tuple[int, ...]:
    """Return the numbers of steps of a row: that which costs the budget, or several if it decides in training."""
    (blocks, stacks), budget = parse(host, row), budget_of(host, tokens)
    if not stacks:
        return (round(budget / count_step(host, blocks)[0]),)
    stacks[0].built = SimpleNamespace(most=blocks)  # the default of `start` depends on it
    start, plan = stacks[0].start, stacks[0].plan
    if not isinstance(plan, Shares):
        return tuple(round(share * budget / count_step(host, start)[0]) for share in DECIDING)
    depths = {0.0: start, **plan.changes(start, blocks)}
    parts = zip(depths.values(), pairwise([*depths, 1.0]), strict=True)
    return (round(budget / sum((end - begin) * count_step(host, depth)[0] for depth, (begin, end) in parts)),)


def train(cell: Cell, rate: float, seed: int, *, compiled: bool = False) -> Result:
    name, _, row, optimizer, steps = cell
    host, (blocks, stacks) = HOSTS[name], parse(name, row)
    data, origin = host.load(), (revision(), date.today().isoformat(), torch.get_num_threads())
    torch.manual_seed(seed)
    module = LitNet(host.make(blocks), steps, rate, by_muon=optimizer == "muon")
    if compiled:
        torch.compiler.reset()  # torch compiles a function eight times, and then runs it uncompiled
        module.net.compile()
    started = time.process_time()
    fit(module, data.train, host.batch, seed, stacks=stacks)
    seconds = round(time.process_time() - started, 1)
    flops = stacks[0].flops_spent if stacks else steps * count_step(name, blocks)[0]
    depth = len(list(module.net.get_submodule(host.lists[0]).children()))
    losses = [evaluate(module.net, *part) for part in ((data.validation, VALIDATED), (data.test, TESTED))]
    return Result(*cell, rate, seed, float(flops), depth, *losses, seconds, *origin, int(compiled))


def first_rate(results: Sequence[Result], cell: Cell) -> float:
    """Return the rate with which a search begins: the best of the nearest budget, if possible of the same row."""
    host, tokens, row, optimizer, _ = cell
    others = [result for result in results if (result.host, result.optimizer, result.seed) == (host, optimizer, 0)]
    others.sort(key=lambda result: (result.row != row, abs(math.log(result.tokens / tokens)), result.validation))
    return others[0].rate if others else HOSTS[host].rate


def fill(path: Path, cell: Cell, rates: Sequence[float] | None, *, seeds: Sequence[int], compiled: bool) -> None:
    """Search the learning rate of a cell, and make the trainings of RNG seeds at the best one, as far as they lack."""
    results = read_rows(path, Result)
    known = {(result.rate, result.seed): result for result in results if result[:5] == cell}
    with appended_rows(path, Result) as append:

        def measure(rate: float, seed: int) -> None:
            if (rate, seed) not in known:
                result = known[rate, seed] = train(cell, rate, seed, compiled=compiled)
                append([result])
                print(f"{cell}: rate {rate:g}, seed {seed}, {result.depth} blocks, test {result.test:.4f}", flush=True)

        todo = set(rates or [first_rate(results, cell)])
        while todo:
            for rate in sorted(todo):
                measure(rate, 0)
            best = best_rate(known.values())
            todo = {rate for rate in (best / 2, 2 * best) if (rate, 0) not in known}
        for seed in seeds:
            measure(best, seed)


def best_rate(results: Iterable[Result]) -> float:
    return min((result for result in results if result.seed == 0), key=lambda result: result.validation).rate


Curves = dict[str, dict[int, list[Result]]]
"""Trainings of each row by RNG seed, in the order of their FLOPs."""


def curves_of(results: Sequence[Result], host: str, optimizer: str) -> Curves:
    """Return the trainings at the best rates; not those of a row that has another number of steps by now."""
    cells: dict[tuple[Any, ...], list[Result]] = {}
    for result in (result for result in results if (result.host, result.optimizer) == (host, optimizer)):
        if result.steps in lengths(host, result.tokens, result.row):
            cells.setdefault(result[:5], []).append(result)
    at_best = [result for of in cells.values() for rate in [best_rate(of)] for result in of if result.rate == rate]
    curves: Curves = {}
    for result in sorted(at_best, key=lambda result: ("Stack" in result.row, result.row, result.flops)):
        curves.setdefault(result.row, {}).setdefault(result.seed, []).append(result)
    return curves


def loss_at(curve: Sequence[Result], x: float, by: str = "flops") -> float:
    """Return the test loss at `x` FLOPs or steps, interpolated in their log; NaN beyond the trainings of the curve."""
    xs = [getattr(result, by) for result in curve]
    if not xs or not 0.99 * xs[0] <= x <= 1.01 * xs[-1]:
        return math.nan
    return float(np.interp(math.log(x), np.log(xs), [result.test for result in curve]))


def flops_to(curve: Sequence[Result], loss: float) -> float:
    """Return the FLOPs after which a curve is at `loss` for good, by lines over log FLOPs of which the outer go on.

    NaN if the line does not fall, or if there is none.
    """
    points = [(math.log(result.flops), result.test) for result in curve]
    above = [k for k, (_, test) in enumerate(points) if test > loss]
    first = max(0, min(above[-1] if above else 0, len(points) - 2))
    if len(points) < 2 or points[first][1] <= points[first + 1][1]:
        return math.nan
    (x0, y0), (x1, y1) = points[first : first + 2]
    return math.exp(x0 + (x1 - x0) * (y0 - loss) / (y0 - y1))


def t_interval(values: Sequence[float]) -> Interval:
    """Return the mean with its interval by Student's t, NaN for a single value."""
    mean, degrees = float(np.mean(values)), len(values) - 1
    half = stats.sem(values) * stats.t.ppf(0.5 + CONFIDENCE / 2.0, degrees) if degrees else math.nan
    return Interval(mean, mean - half, mean + half)


def best_fixed(curves: Curves, flops: float) -> str:
    """Return the best fixed depth by validation among those with most RNG seeds at a budget; an empty text: none."""
    found = {
        row: [r.validation for curve in by_seed.values() for r in curve if abs(r.flops / flops - 1.0) < 0.01]
        for row, by_seed in curves.items()
        if row.startswith("blocks=")
    }
    return min(filter(found.get, found), key=lambda row: (-len(found[row]), np.mean(found[row])), default="")


def leads(curves: Curves, row: str, rival: str, x: float, by: str = "flops") -> list[float]:
    """Return by how much `row` is ahead of a rival at `x` FLOPs or steps, for the RNG seeds that both have there."""
    rivals = curves.get(rival, {})
    found = [loss_at(rivals.get(seed, []), x, by) - loss_at(curve, x, by) for seed, curve in curves[row].items()]
    return [lead for lead in found if not math.isnan(lead)]


def saved(curves: Curves, row: str, flops: float) -> tuple[Interval, bool] | None:
    """Return the compute that a row saves, as a share, and if its trainings reach so far. None where they do not tell.

    The interval is that of the log of the FLOPs needed, whose errors are even.
    """
    rivals = curves.get(best_fixed(curves, flops), {})
    goals = {seed: loss_at(of, flops) for seed, of in rivals.items() if len(curves[row].get(seed, ())) > 1}
    goals = {seed: goal for seed, goal in goals.items() if not math.isnan(goal)}
    needed = [flops_to(curves[row][seed], goal) for seed, goal in goals.items()]
    if not needed or any(map(math.isnan, needed)):
        return None
    is_inside = not any(math.isnan(loss_at(curves[row][seed], x)) for seed, x in zip(goals, needed, strict=True))
    mean, low, high = (1.0 - math.exp(x) for x in t_interval(np.log(needed) - math.log(flops)))
    return Interval(mean, high, low), is_inside


def table(results: Sequence[Result], host: str, optimizer: str, tokens: float) -> Iterator[str]:
    """Yield the lines of the table of one budget."""

    def told(values: Sequence[float], signed: bool = True) -> str:
        return shown(t_interval(values), signed).partition(" ± nan")[0].partition(" [nan")[0] if values else ""

    curves, budget = curves_of(results, host, optimizer), budget_of(host, tokens)
    best = best_fixed(curves, budget)
    yield "| row | steps | blocks | rate | RNG seeds | loss | ahead, equal FLOPs | ahead, equal steps | compute saved |"
    yield "|---|--:|--:|--:|--:|---|---|---|---|"
    for row, by_seed in curves.items():
        own = [result for curve in by_seed.values() for result in curve if result.tokens == tokens]
        if not own:
            continue
        losses = [loss for curve in by_seed.values() if not math.isnan(loss := loss_at(curve, budget))]
        steps, depths, rates = (sorted({getattr(r, name) for r in own}) for name in ("steps", "depth", "rate"))
        cells = [", ".join(f"{x:g}" for x in numbers) for numbers in (steps, depths, rates)]
        cells += [str(len(losses)), told(losses, signed=False)]
        cells += [told(leads(curves, row, best, budget)) if row != best else "", "", ""]
        if "Stack" in row and len(steps) == 1:
            cells[-2] = told(leads(curves, row, f"blocks={depths[0]}", steps[0], "steps"))
        if "Stack" in row and (found := saved(curves, row, budget)):
            mean, low, high = (f"{np.round(100 * x) + 0.0:.0f}".replace("-", "−") for x in found[0])
            cells[-1] = f"{mean} % [{low}, {high}]".replace(" [nan, nan]", "") + "*" * (not found[1])
        yield f"| {f'**`{row}`**' if row == best else f'`{row}`'} | {' | '.join(cells)} |"


def draw(results: Sequence[Result], host: str, optimizer: str, rows: Sequence[str], out: Path) -> None:
    """Draw loss over FLOPs on one host, means over RNG seeds, and compute saved over targets per parameter on all."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.0, 4.4), layout="constrained")
    for each in dict.fromkeys(result.host for result in results):
        curves = curves_of(results, each, optimizer)
        budgets = {tokens: budget_of(each, tokens) for tokens in sorted({r.tokens for r in results if r.host == each})}
        for row in filter(curves.get, rows):
            seeds = curves[row].values()
            xs = sorted({result.flops for curve in seeds for result in curve})
            if each == host:
                losses = [np.nanmean([loss_at(curve, x) for curve in seeds]) for x in xs]
                left.plot(np.array(xs) / 1e9, losses, "o-" if "Stack" in row else "s:", label=row)
            shares = {tokens: saved(curves, row, flops) for tokens, flops in budgets.items()}
            found = {tokens: share[0] for tokens, share in shares.items() if share and share[1]}
            if "Stack" in row and found:
                means, lows, highs = 100.0 * np.array(list(found.values())).T
                bars = np.nan_to_num([means - lows, highs - means])
                right.errorbar(list(found), means, bars, fmt="o-", capsize=3, label=f"{each}: {row}")
    left.set(xlabel="training FLOPs (10⁹)", ylabel="test loss (nats)", xscale="log", title=host)
    right.set(xlabel="targets for each parameter of six blocks", ylabel="compute saved (%)", xscale="log")
    for axes in (left, right):
        axes.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter="")
        axes.legend(fontsize="x-small")
    figure.savefig(out, dpi=120)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "table", "picture"))
    parser.add_argument("--host", choices=HOSTS, default="gpt16")
    parser.add_argument("--budget", nargs="+", type=float, default=[25.0], help="targets per parameter of six blocks")
    parser.add_argument("--rows", nargs="+", default=(), metavar="ROW", help="user's lines, as in the tables")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates with which the search begins")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="RNG seeds at the best rate")
    parser.add_argument("--compile", action="store_true", help="compile networks, for which torch needs a C++ compiler")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("depth.png"))
    chosen = parser.parse_args(args)
    if not chosen.rows and chosen.verb != "table":
        parser.error("name rows, such as --rows blocks=1 blocks=2")
    host, optimizer = chosen.host, chosen.optimizer
    if chosen.verb == "picture":
        draw(read_rows(chosen.csv, Result), host, optimizer, chosen.rows, chosen.out)
        return
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    for tokens in chosen.budget:
        if chosen.verb == "table":
            print("\n".join(table(read_rows(chosen.csv, Result), host, optimizer, tokens)), end="\n\n")
            continue
        for row in chosen.rows:
            for steps in lengths(host, tokens, row):
                cell = (host, tokens, row, optimizer, steps)
                fill(chosen.csv, cell, chosen.rates, seeds=chosen.seeds, compiled=chosen.compile)


if __name__ == "__main__":
    main()
