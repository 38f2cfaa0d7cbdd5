"""Growth in depth by copies against networks of a fixed depth, at equal training FLOPs.

    python -m benchmarks.depth run --steps 14000 --rows six three "3 to 6" --rates 4e-3 2e-3 1e-3
    python -m benchmarks.depth run --steps 14000 --rows six three "3 to 6" --seeds 0 1 2    # at the best rate so far
    python -m benchmarks.depth table --steps 14000
    python -m benchmarks.depth curves --steps 14000 --out docs/depth.png
    python -m benchmarks.depth run --host gpt32 --steps 3000 --rows one two "1 to 2" --rates 5e-3
    python -m benchmarks.depth value

run: make the trainings that the results lack. All rows have the same number of FLOPs of training, those of `--steps`
    steps of six blocks, so a small network makes more steps. The learning rate warms up over 100 steps, is constant,
    and falls to 0 over the last fifth of the FLOPs. AdamW; gradients are clipped to norm 1; one thread.
table: the best learning rate of each row, by the validation loss of RNG seed 0, with the rates beside it; the test loss
    at that rate; the lead over six blocks, paired by RNG seed; the FLOPs and the processor time that are saved: 1 − the
    share at which the validation loss of the row falls below the final one of six blocks; processor time of the whole
    training relative to six blocks.
curves: validation loss over FLOPs, a line for each row at its best rate, means over RNG seeds.
value: what it is worth to know the context (network, rate and budget) of the small GPTs. Test losses, RNG seed 0; and
    how far the best single row, the best row of each budget, a rule, and the best fixed depth are behind the best row
    of each context. The rule doubles one block while the budget has so many tokens for each parameter of the final
    network, at six FLOPs per token and parameter.

Hosts: `gpt` (width 64, bytes, source of the Python installation), `vit` (patches of 4) and `cnn` (three stages, each as
deep as the row says) on letters at 32×32, `mlp` (residual, width 64) on the table of digits. `gpt32` and `gpt16` are
narrower, with shorter texts; `english` is `gpt32` on the Python language reference.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.vision_transformer import VisionTransformer

from benchmarks.rows import appended_rows, read_rows
from esper_lightning.envs.flops import FlopCounter, positions_per_parameter
from esper_lightning.growth import stack
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.stack import Content, Order, State
from esper_lightning.hosts import GPT
from esper_lightning.tasks import Glyphs, Source, Tabular, Text
from esper_lightning.tasks.task import Split, TaskData

RESULTS = Path(__file__).parent / "results" / "depth.csv"
WARMUP, DECAY = 100, 0.2
"""Steps of warm-up, and share of the FLOPs over which the learning rate falls to 0."""
POINTS = 20
"""Validations of a training, at equal shares of its FLOPs."""
VALIDATED, TESTED = 256, 2048
"""Largest numbers of samples of a validation and of the test."""


class Plan(NamedTuple):
    """Depth of a network over its training."""

    start: int
    growth: tuple[tuple[float, int], ...] = ()  # (share of the FLOPs, depth from then on)
    order: Order = "stack"
    new: Content = "copy"
    state: State = "copy"
    rate_after: float = 1.0  # factor of the learning rate after growth


AT_20 = ((0.2, 6),)
PLANS = {
    "one": Plan(1),
    "two": Plan(2),
    "three": Plan(3),
    "six": Plan(6),
    "3 to 6": Plan(3, AT_20),
    "3 to 6 at 10 %": Plan(3, ((0.1, 6),)),
    "3 to 6 at 30 %": Plan(3, ((0.3, 6),)),
    "3 to 6 at 50 %": Plan(3, ((0.5, 6),)),
    "3 to 6, interleave": Plan(3, AT_20, order="interleave"),
    "3 to 6, last": Plan(3, AT_20, order="last"),
    "3 to 6, middle": Plan(3, AT_20, order="middle"),
    "3 to 6, zero": Plan(3, AT_20, new="zero"),
    "3 to 6, fresh": Plan(3, AT_20, new="fresh"),
    "3 to 6, state reset": Plan(3, AT_20, state="reset"),
    "3 to 6, half the rate after": Plan(3, AT_20, rate_after=0.5),
    "1 to 6": Plan(1, AT_20),
    "1 to 3 to 6": Plan(1, ((0.1, 3), (0.3, 6))),
    "1 to 2": Plan(1, ((0.3, 2),)),
    "1 to 3": Plan(1, ((0.3, 3),)),
    "1 to 2 to 4": Plan(1, ((0.2, 2), (0.5, 4))),
    "2 to 4": Plan(2, ((0.3, 4),)),
    "2 to 6": Plan(2, ((0.3, 6),)),
    "2 to 4 to 8": Plan(2, ((0.2, 4), (0.5, 8))),
}


DOUBLED = ("one", "1 to 2", "1 to 2 to 4")
"""Plans of the rule."""
THRESHOLDS = (10, 15, 20, 25, 30, 40)
"""Tokens per parameter that the rule asks for."""


class ResidualBlock(nn.Module):
    """Pre-norm residual block: normalise, widen, GELU, narrow."""

    def __init__(self, norm: nn.Module, widen: nn.Module, narrow: nn.Module) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = norm, widen, narrow

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
        convolutions = ((nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)) for _ in range(depth))
        layers.append(nn.Sequential(*(ResidualBlock(nn.BatchNorm2d(width), *both) for both in convolutions)))
    return nn.Sequential(
        *layers, nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 62)
    )


def make_mlp(depth: int) -> nn.Module:
    blocks = (ResidualBlock(nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)) for _ in range(depth))
    return nn.Sequential(nn.Linear(64, 64), nn.Sequential(*blocks), nn.LayerNorm(64), nn.Linear(64, 10))


class Host(NamedTuple):
    """A network that can be built at several depths, with its task."""

    make: Callable[[int], nn.Module]
    lists: tuple[str, ...]  # names of its lists of like blocks
    zero: tuple[str, ...]  # last layers of the residual branches of a block
    load: Callable[[], TaskData]
    batch: int  # samples in a minibatch


LETTERS = cache(lambda: Glyphs(32, train=24_000, validation=1_000, test=4_000).load())
GPT_HOST = Host(make_gpt, ("blocks",), ("attention.project", "mlp.2"), lambda: Source(length=128).load(), 4)
HOSTS = {
    "gpt": GPT_HOST,
    "vit": Host(make_vit, ("encoder.layers",), ("self_attention.out_proj", "mlp.3"), LETTERS, 32),
    "cnn": Host(make_cnn, ("1", "3", "5"), ("narrow",), LETTERS, 32),
    "mlp": Host(make_mlp, ("1",), ("narrow",), lambda: Tabular("digits").load(), 32),
    "gpt32": GPT_HOST._replace(make=partial(make_gpt, width=32, length=64), load=lambda: Source(length=64).load()),
    "gpt16": GPT_HOST._replace(make=partial(make_gpt, width=16, length=64), load=lambda: Source(length=64).load()),
    "english": GPT_HOST._replace(make=partial(make_gpt, width=32, length=64), load=lambda: Text(length=64).load()),
}


class Row(NamedTuple):
    """One measurement of a training."""

    host: str
    steps: int  # of six blocks: the budget
    plan: str
    rate: float
    seed: int
    split: str
    share: float  # of the FLOPs
    flops: float
    seconds: float  # processor time of training, without validations
    depth: int
    loss: float
    accuracy: float


def loss_of(net: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropy and accuracy, means over samples and places."""
    outputs = net(inputs if inputs.dtype == torch.uint8 else inputs.float())
    outputs, targets = outputs.flatten(0, -2), targets.long().flatten()
    return F.cross_entropy(outputs, targets), (outputs.detach().argmax(1) == targets).float().mean()


@torch.no_grad()
def evaluate(net: nn.Module, split: Split, most: int) -> tuple[float, float]:
    """Return loss and accuracy on evenly spaced samples of a split."""
    net.eval()
    chosen = torch.linspace(0, split.samples - 1, min(most, split.samples)).long()
    sums = torch.zeros(2)
    for part in chosen.split(64):
        sums += len(part) * torch.stack(loss_of(net, split.inputs[part], split.targets[part]))
    net.train()
    loss, accuracy = (sums / len(chosen)).tolist()
    return loss, accuracy


@cache
def step_flops(host: Host, depth: int) -> int:
    """Return the FLOPs of one training step, forward and backward."""
    net, split = host.make(depth), host.load().train
    with FlopCounter() as counter:
        loss_of(net, split.inputs[: host.batch], split.targets[: host.batch])[0].backward()
    return counter.total


def train(name: str, steps: int, plan_name: str, rate: float, seed: int) -> Iterator[Row]:
    """Train one network and yield its measurements."""
    host, plan = HOSTS[name], PLANS[plan_name]
    data, budget, growth = host.load(), steps * step_flops(host, 6), list(plan.growth)
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    net, depth, spent, seconds, factor = host.make(plan.start), plan.start, 0, 0.0, 1.0
    matrices, vectors = ([p for p in net.parameters() if (p.dim() > 1) == large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
    points = [(k + 1) / POINTS for k in range(POINTS)]

    def row(split: str, loss: float, accuracy: float) -> Row:
        share = round(spent / budget, 4)
        return Row(name, steps, plan_name, rate, seed, split, share, spent, round(seconds, 2), depth, loss, accuracy)

    step = 0
    while spent < budget:
        started = time.process_time()
        if growth and spent >= growth[0][0] * budget:
            _, depth = growth.pop(0)
            factor *= plan.rate_after
            for blocks in host.lists:
                zero = host.zero if plan.new == "zero" else ()
                content = {"new": plan.new, "state": plan.state, "zero": zero}
                stack(net, blocks, to=depth, optimizer=optimizer, order=plan.order, **content)
        for group in optimizer.param_groups:
            group["lr"] = rate * factor * min(1.0, (step + 1) / WARMUP, (1.0 - spent / budget) / DECAY)
        chosen = torch.randint(data.train.samples, (host.batch,), generator=random)
        optimizer.zero_grad()
        loss_of(net, data.train.inputs[chosen], data.train.targets[chosen])[0].backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        step, spent = step + 1, spent + step_flops(host, depth)
        seconds += time.process_time() - started
        if spent >= points[0] * budget:
            points.pop(0)
            yield row("validation", *evaluate(net, data.validation, VALIDATED))
    yield row("test", *evaluate(net, data.test, TESTED))


def best_rates(rows: Sequence[Row]) -> dict[str, dict[float, float]]:
    """Return the final validation loss of each plan by rate, RNG seed 0, the best rate first."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if row.split == "validation" and row.share >= 1.0 and row.seed == 0:
            found.setdefault(row.plan, {})[row.rate] = row.loss
    return {plan: dict(sorted(of.items(), key=lambda pair: pair[1])) for plan, of in found.items()}


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table."""
    rates = best_rates(rows)
    at_best = [row for row in rows if row.rate == next(iter(rates.get(row.plan, ())), None)]
    tests = {(row.plan, row.seed): row for row in at_best if row.split == "test"}
    lines = ["| network | rate | rates tried | test loss | ahead of six | FLOPs saved | time saved | processor time |"]
    lines.append("|---|--:|---|---|---|---|---|--:|")
    for plan in (plan for plan in PLANS if plan in rates):
        seeds = sorted(seed for name, seed in tests if name == plan)
        both = [seed for seed in seeds if ("six", seed) in tests]
        leads = np.array([tests["six", seed].loss - tests[plan, seed].loss for seed in both])
        saved = [[100 * (1 - reached(at_best, plan, seed, by=by)) for seed in both] for by in ("flops", "seconds")]
        slower = np.median([tests[plan, seed].seconds / tests["six", seed].seconds for seed in both] or [np.nan])
        tried = ", ".join(f"{rate:g}" for rate in sorted(rates[plan]))
        lead = f"{leads.mean():+.3f} ({', '.join(f'{lead:+.3f}' for lead in leads)})" if len(leads) else ""
        cells = (
            f"{next(iter(rates[plan])):g}",
            tried,
            ", ".join(f"{tests[plan, seed].loss:.3f}" for seed in seeds),
            "" if plan == "six" else lead,
            *("" if plan == "six" else ", ".join(f"{share:.0f} %" for share in of) for of in saved),
            f"{slower:.2f}",
        )
        lines.append(f"| {plan} | {' | '.join(cells)} |")
    return lines


def reached(rows: Sequence[Row], plan: str, seed: int, *, by: Literal["flops", "seconds"]) -> float:
    """Return the share of the FLOPs, or of the time, of six blocks at which a plan is below their final loss for good.

    1 if it never is.
    """
    (six,) = (r for r in rows if (r.plan, r.seed, r.split) == ("six", seed, "validation") and r.share >= 1.0)
    goal, own = six.loss, [r for r in rows if (r.plan, r.seed, r.split) == (plan, seed, "validation")]
    curve = sorted((getattr(r, by) / getattr(six, by), r.loss) for r in own)
    above = [k for k, (_, loss) in enumerate(curve) if loss > goal]
    if not above or above[-1] == len(curve) - 1:
        return 1.0 if above else curve[0][0]
    (x0, y0), (x1, y1) = curve[above[-1] : above[-1] + 2]
    return x0 + (x1 - x0) * (y0 - goal) / (y0 - y1)


def value(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table of the small GPTs, with rows that every context has; see above."""
    small = ("gpt32", "gpt16", "english")
    tests: dict[tuple[str, float, int], dict[str, Row]] = {}  # by host, rate and budget
    for row in (row for row in rows if row.host in small and row.split == "test" and row.seed == 0):
        tests.setdefault((row.host, row.rate, row.steps), {})[row.plan] = row
    contexts = sorted(tests)
    plans = [plan for plan in PLANS if all(plan in tests[context] for context in contexts)]
    found = np.array([[tests[context][plan].loss for context in contexts] for plan in plans])  # [plans, contexts]
    behind = found - found.min(0)
    lines = [f"| network | {' | '.join(f'{h}, {r:g}, {s}' for h, r, s in contexts)} | behind the best, mean |"]
    lines.append(f"|---|{'--:|' * (len(contexts) + 1)}")
    for plan, of, gaps in zip(plans, found, behind, strict=True):
        lines.append(f"| {plan} | {' | '.join(f'{loss:.3f}' for loss in of)} | {gaps.mean():.3f} |")
    budgets = np.array([steps for _, _, steps in contexts])
    of_budget = [behind[:, budgets == steps] for steps in dict.fromkeys(budgets)]
    fixed = [i for i, plan in enumerate(plans) if not PLANS[plan].growth]

    def tokens(row: Row) -> float:  # per parameter of the final network
        return positions_per_parameter(row.flops, count_parameters(HOSTS[row.host].make(row.depth)))

    def of_rule(least: float) -> float:
        chosen = ([p for p in DOUBLED if p == "one" or tokens(tests[context][p]) >= least][-1] for context in contexts)
        return float(np.mean([behind[plans.index(plan), k] for k, plan in enumerate(chosen)]))

    for name, number in (
        ("best single row", behind.mean(1).min()),
        ("best row of each budget", sum(own.sum(1).min() for own in of_budget) / len(contexts)),
        *((f"rule, {least} tokens per parameter", of_rule(least)) for least in THRESHOLDS),
        ("best fixed depth of each context", behind[fixed].min(0).mean()),
    ):
        lines.append(f"\n{name}: {number:.4f} nats behind the best of each context, mean over {len(contexts)} contexts")
    return lines


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw validation loss over FLOPs."""
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for plan, rates in best_rates(rows).items():
        own = [r for r in rows if r.plan == plan and r.rate == next(iter(rates)) and r.split == "validation"]
        seeds = {r.seed for r in own}
        curves = [[(r.flops, r.loss) for r in own if r.seed == seed] for seed in seeds]
        mean = np.mean([curve[: min(map(len, curves))] for curve in curves], axis=0)
        axes.plot(mean[:, 0] / 1e12, mean[:, 1], label=f"{plan} ({len(seeds)})")
    axes.set(xlabel="training FLOPs (10¹²)", ylabel="validation loss (nats)")
    axes.legend(title="network (RNG seeds)", fontsize="small")
    figure.savefig(out, dpi=120)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "table", "curves", "value"))
    parser.add_argument("--host", choices=HOSTS, default="gpt")
    parser.add_argument("--steps", type=int, default=14_000, help="budget in steps of six blocks")
    parser.add_argument("--rows", nargs="+", choices=PLANS, default=list(PLANS), metavar="ROW")
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates; left out: the best so far of each row")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="RNG seeds")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("depth.png"))
    chosen = parser.parse_args(args)
    if chosen.verb == "value":
        print("\n".join(value(read_rows(chosen.csv, Row))))
        return
    rows = [row for row in read_rows(chosen.csv, Row) if (row.host, row.steps) == (chosen.host, chosen.steps)]
    if chosen.verb == "table":
        print("\n".join(table(rows)))
    elif chosen.verb == "curves":
        draw([row for row in rows if row.plan in chosen.rows], chosen.out)
    else:
        torch.set_num_threads(1)
        done = {row[:5] for row in rows}
        best = best_rates(rows)
        with appended_rows(chosen.csv, Row) as append:
            for seed in chosen.seeds:
                for plan in chosen.rows:
                    for rate in chosen.rates or list(best[plan])[:1]:
                        if (chosen.host, chosen.steps, plan, rate, seed) not in done:
                            measured = list(train(chosen.host, chosen.steps, plan, rate, seed))
                            append(measured)
                            print(f"{plan}, rate {rate:g}, seed {seed}: test loss {measured[-1].loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
