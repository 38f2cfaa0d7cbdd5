"""Detection of hosts that are broken while they train under the Governor."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.governor.kinds import DETECTION_TICKS, KINDS, QUICK, DetectionCount, open_pool, show
from esper_lightning.controllers.rules import WaitOnly
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.tasks import Split


def change_weights(change: Callable[[Tensor], object], env: HostEnv) -> None:
    """Change each weight tensor of the host in place."""
    with torch.no_grad():
        for parameter in env.optimizer.param_groups[0]["params"]:
            change(parameter)


def set_one_weight(value: float, env: HostEnv) -> None:
    """Set one weight of the host to `value`."""
    with torch.no_grad():
        env.optimizer.param_groups[0]["params"][0].view(-1)[0] = value


def scale_learning_rate(factor: float, env: HostEnv) -> None:
    """Multiply the host's learning rate by `factor`."""
    for group in env.optimizer.param_groups:
        group["lr"] *= factor


BREAKS: dict[str, Callable[[HostEnv], None]] = {
    "one weight NaN": partial(set_one_weight, math.nan),
    "all weights NaN": partial(change_weights, lambda weights: weights.fill_(math.nan)),
    "all weights inf": partial(change_weights, lambda weights: weights.fill_(math.inf)),
    "all weights × 1000": partial(change_weights, lambda weights: weights.mul_(1000.0)),
    "all weights 0": partial(change_weights, lambda weights: weights.zero_()),
    "learning rate × 1000": partial(scale_learning_rate, 1000.0),
}
"""Ways to break the weights or the optimizer of a host."""

WRONG_LABELS: dict[str, Callable[[Split, int], Split]] = {
    "labels off by one": lambda split, classes: Split(split.inputs, (split.targets + 1) % classes),
    "labels drawn at random": lambda split, classes: Split(
        split.inputs, torch.randint(classes, split.targets.shape, generator=torch.Generator().manual_seed(0))
    ),
}
"""Ways to break the training labels."""

BROKEN_KINDS = (
    "CNN 1×1, 390 parameters, Adam .005",
    "CNN 3×3, base 8, Adam .002",
    "CNN 3×3, base 8, Adam .02",
    "MLP of width 64, Adam .002",
    "GPT of width 32 on text, Adam .003",
)
"""Kinds of hosts that are broken."""

BREAK_AT, AFTERWARDS = (4, 12), 10
"""Numbers of ticks before a host is broken, and number of ticks that are observed afterwards."""


class BreakOutcome(NamedTuple):
    """Outcome of one broken host."""

    learned: bool  # the mean loss of the last three ticks before the break was below 60 % of the loss of guessing
    tick: int | None  # tick of its rollback, counted from the break; None: not within `AFTERWARDS`


def break_live(kind: str, name: str, break_at: int, hosts: int) -> list[BreakOutcome]:
    """Break every host after `after` ticks and return the outcomes, except for hosts that were rolled back earlier."""
    pool = open_pool(KINDS[kind], break_at + AFTERWARDS, hosts, QUICK, "fused")
    pool.reset(range(hosts))
    wait = WaitOnly()
    early = {
        host_verdict.host
        for _ in range(break_at)
        for host_verdict in pool.step(wait.act(pool)).verdicts
        if host_verdict.decision.diverged
    }
    learned = [fmean(env.history.loss[-3:]) < 0.6 * pool.data.chance_loss for env in pool.envs]
    if name in WRONG_LABELS:
        wrong = WRONG_LABELS[name](pool.data.train, pool.data.outputs)
        pool.data = pool.data._replace(train=wrong)
    else:
        for env in pool.envs:
            BREAKS[name](env)
    found: dict[int, int] = {}
    for tick in range(1, AFTERWARDS + 1):
        for host_verdict in pool.step(wait.act(pool)).verdicts:
            if host_verdict.decision.diverged:
                found.setdefault(host_verdict.host, tick)
    return [BreakOutcome(learned[host], found.get(host)) for host in range(hosts) if host not in early]


def judge_live(hosts: int, markdown: bool) -> None:
    """Print how many broken hosts the Governor detects, for each way to break them."""
    rows = []
    for name in (*BREAKS, *WRONG_LABELS):
        broken = [
            one for after, kind in product(BREAK_AT, BROKEN_KINDS) for one in break_live(kind, name, after, hosts)
        ]
        row = [name]
        for learned in (True, False):
            ticks = [one.tick for one in broken if one.learned == learned]
            when = Counter(tick for tick in ticks if tick is not None)
            row.append(DetectionCount(sum(when[tick] for tick in range(1, DETECTION_TICKS + 1)), len(ticks)))
            row.append(", ".join(f"{tick}: {when[tick]}" for tick in sorted(when)))
        rows.append(row)
        print(f"broken: {name}", flush=True)
    columns = [f"{who}: found in {DETECTION_TICKS} ticks" for who in ("had learned", "had not")]
    columns = ["what was done", columns[0], "in tick: hosts", columns[1], "in tick: hosts"]
    show("Hosts broken while they train", columns, rows, markdown)
