"""Share of a tick that the Governor's judgements and snapshots take."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.governor.kinds import show
from benchmarks.hosts import CASES, ExecutorChoice, make_pool
from esper_lightning.controllers.rules import WaitOnly
from esper_lightning.envs import HostPool

COSTS = {
    "CNN 3×3, base 8, 32×32 images, 16 hosts, loop": ("32x8", 16, ExecutorChoice("loop", True), 10),
    "CNN 1×1, digits, 48 hosts, fused": ("digits", 48, ExecutorChoice("fused", False), 20),
}
"""Measured cases by name: case, number of hosts, executor, and ticks per round."""


def timed(work: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return `work` wrapped so that each call appends its duration in seconds to `spent`."""

    def call(*args: Any, **more: Any) -> Any:
        begin = time.perf_counter()
        result = work(*args, **more)
        spent.append(time.perf_counter() - begin)
        return result

    return call


def measure_cost(pool: HostPool, spent: list[float], ticks: int) -> tuple[float, float]:
    """Return the shares of judging and of snapshots, as often as the settings say, in the time of `ticks` ticks."""
    controller, snapshot_seconds = WaitOnly(), []
    spent.clear()
    pool.clock.take_seconds()
    begin = time.perf_counter()
    for _ in range(ticks):
        pool.step(controller.act(pool))
    # Hosts overfit random targets, so the Governor takes snapshots at unusual times: these are measured separately.
    without = time.perf_counter() - begin - pool.clock.take_seconds()["governor"]
    for env in pool.envs:
        timed(env.take_snapshot, snapshot_seconds)()
    snapshots = sum(snapshot_seconds) / pool.governor.snapshot_every
    tick = without / ticks + snapshots
    return sum(spent) / ticks / tick, snapshots / tick


def measure_costs(rounds: int, markdown: bool) -> None:
    """Print the table of costs: medians and extremes over rounds."""
    rows = []
    for name, (case, hosts, choice, ticks) in COSTS.items():
        pool, spent = make_pool(CASES[case], CASES[case].task.load(), hosts, choice, "different"), []
        for env in pool.envs:
            env.monitor.judge = timed(env.monitor.judge, spent)
        measure_cost(pool, spent, 2)
        costs = [measure_cost(pool, spent, ticks) for _ in range(rounds)]
        parts = [*zip(*costs, strict=True), [sum(one) for one in costs]]
        rows.append([name, *(f"{median(part):.2%} ({min(part):.2%} … {max(part):.2%})" for part in parts)])
    show("Share of a tick", ["hosts", "judging", "snapshots", "together"], rows, markdown)
