"""What share of a tick judging and snapshots take."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from benchmarks.governor.report import show
from benchmarks.hosts import CASES, make_pool
from esper_lightning.envs import HostPool
from esper_lightning.envs.execution.choice import Choice
from esper_lightning.tamiyo.baselines import WaitOnly

COSTS = {
    "CNN 3×3, base 8, 32×32 images, 16 hosts, loop": ("32x8", 16, Choice("loop", True), 10),
    "CNN 1×1, digits, 48 hosts, fused": ("digits", 48, Choice("fused", False), 20),
}


class Cost(NamedTuple):
    """Shares of a tick."""

    judging: float
    snapshots: float


def timed(work: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The same, which notes how long it takes."""

    def call(*args: Any) -> Any:
        begin = time.perf_counter()
        result = work(*args)
        spent.append(time.perf_counter() - begin)
        return result

    return call


def open_costly(name: str) -> tuple[HostPool, list[float]]:
    """Hosts with seeds, no two alike, and where the seconds of every judgement are noted."""
    case, hosts, choice, _ = COSTS[name]
    pool, spent = make_pool(CASES[case], CASES[case].task.load(), hosts, choice, "different"), []
    for env in pool.envs:
        env.judge = timed(env.judge, spent)
    return pool, spent


def cost(pool: HostPool, spent: list[float], ticks: int) -> Cost:
    """Of so many ticks, with a snapshot of every host as often as the settings say."""
    wait, kept = WaitOnly(), []
    spent.clear()
    pool.clock.take()
    begin = time.perf_counter()
    for _ in range(ticks):
        pool.step(wait.act(pool))
    # Random targets are learned by heart, which no Governor likes: when it takes snapshots there says nothing.
    without = time.perf_counter() - begin - pool.clock.take()["governor"]
    for env in pool.envs:
        timed(env.keep, kept)()
    snapshots = sum(kept) / pool.config.governor.snapshot_every
    tick = without / ticks + snapshots
    return Cost(sum(spent) / ticks / tick, snapshots / tick)


def measure_costs(rounds: int, markdown: bool) -> None:
    rows = []
    for name, (*_, ticks) in COSTS.items():
        pool, spent = open_costly(name)
        cost(pool, spent, 2)
        costs = [cost(pool, spent, ticks) for _ in range(rounds)]
        parts = [[one.judging for one in costs], [one.snapshots for one in costs], [sum(one) for one in costs]]
        rows.append([name, *(f"{median(part):.2%} ({min(part):.2%} … {max(part):.2%})" for part in parts)])
    show("Share of a tick", ["hosts", "judging", "snapshots", "together"], rows, markdown)
