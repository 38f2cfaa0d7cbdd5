"""Share of a tick that the Governor's judgements and snapshots take."""

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
"""Measured cases by name: case, number of hosts, executor, and ticks per round."""


class Cost(NamedTuple):
    """Shares of the time of one tick."""

    judging: float
    snapshots: float


def timed(work: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return `work` wrapped so that each call appends its duration in seconds to `spent`."""

    def call(*args: Any) -> Any:
        begin = time.perf_counter()
        result = work(*args)
        spent.append(time.perf_counter() - begin)
        return result

    return call


def open_costly(name: str) -> tuple[HostPool, list[float]]:
    """Return a pool of hosts with different seeds, and the list that collects the seconds of every judgement."""
    case, hosts, choice, _ = COSTS[name]
    pool, spent = make_pool(CASES[case], CASES[case].task.load(), hosts, choice, "different"), []
    for env in pool.envs:
        env.judge = timed(env.judge, spent)
    return pool, spent


def cost(pool: HostPool, spent: list[float], ticks: int) -> Cost:
    """Measure the Governor's cost over `ticks` ticks, with snapshots as often as the settings say."""
    wait, kept = WaitOnly(), []
    spent.clear()
    pool.clock.take()
    begin = time.perf_counter()
    for _ in range(ticks):
        pool.step(wait.act(pool))
    # Hosts overfit random targets, so the Governor takes snapshots at unusual times: these are measured separately.
    without = time.perf_counter() - begin - pool.clock.take()["governor"]
    for env in pool.envs:
        timed(env.keep, kept)()
    snapshots = sum(kept) / pool.config.governor.snapshot_every
    tick = without / ticks + snapshots
    return Cost(sum(spent) / ticks / tick, snapshots / tick)


def measure_costs(rounds: int, markdown: bool) -> None:
    """Print the table of costs: medians and extremes over rounds."""
    rows = []
    for name, (*_, ticks) in COSTS.items():
        pool, spent = open_costly(name)
        cost(pool, spent, 2)
        costs = [cost(pool, spent, ticks) for _ in range(rounds)]
        parts = [[one.judging for one in costs], [one.snapshots for one in costs], [sum(one) for one in costs]]
        rows.append([name, *(f"{median(part):.2%} ({min(part):.2%} … {max(part):.2%})" for part in parts)])
    show("Share of a tick", ["hosts", "judging", "snapshots", "together"], rows, markdown)
