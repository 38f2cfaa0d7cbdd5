"""Measure how fast each executor trains N hosts, compared with a plain PyTorch loop over the same hosts.

    python -m benchmarks.execution --case digits --hosts 16 --repeats 5 --markdown
    python -m benchmarks.execution --case 32x8 32x32 --hosts 4 16 --grown --markdown
    python -m benchmarks.execution --case 32x32 --hosts 4 16 --grown --precision bf16

The benchmark runs on a GPU if there is one, else on the CPU. The raw loop has no validation or controller, and seeds
only with `--grown`: it trains hosts one after the other with torch's defaults, on the CPU once with one thread per
operator and once with all cores. Every round measures the raw loop and each executor in turn, so that other load on the
machine affects all of them. Figures are medians over rounds, with extremes in brackets; ratios are to the faster raw
loop of the same round in the precision of the hosts, and once more to the one in fp32. `train` compares training alone;
`tick` is a whole tick of the application, with validation, counterfactuals, observation, masks and rewards. `other` is
the share of a tick in which hosts do not compute. `MiB` is the peak GPU memory of a pool and its training. A star marks
the executor that `auto` stands for.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.hosts import (
    BATCH,
    BATCHES,
    CASES,
    SEED_PLACEMENTS,
    ExecutorChoice,
    RawLoop,
    SeedPlacement,
    choices,
    make_pool,
)
from esper_lightning.envs import HostPool
from esper_lightning.envs.actions import Op, to_action
from esper_lightning.envs.executors.parallel import usable_cores
from esper_lightning.envs.host_training import PRECISIONS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Device of all measurements."""

HOSTS = {"cpu": (1, 4, 16, 64), "cuda": (16, 64, 256)}
"""Measured numbers of hosts, by device type."""

NON_HOST_PHASES = ("policy", "update", "bookkeeping")
"""Phases of a tick in which hosts do not compute."""


class Round(NamedTuple):
    """Seconds of one tick."""

    tick: float
    train: float  # fetching the minibatches included
    hosts: float  # all arithmetic of hosts


class MedianRange(NamedTuple):
    """Median, minimum and maximum of one quantity over all rounds."""

    middle: float
    low: float
    high: float

    def show(self, digits: int) -> str:
        return f"{self.middle:.{digits}f} ({self.low:.{digits}f} … {self.high:.{digits}f})"


def spread(values: Sequence[float]) -> MedianRange:
    return MedianRange(median(values), min(values), max(values))


class Row(NamedTuple):
    """Results of one executor on hosts of one kind."""

    case: str
    hosts: int
    seeds: SeedPlacement
    executor: str
    env_steps_per_s: MedianRange
    images_per_s: MedianRange
    train_ratio: MedianRange
    fp32_ratio: MedianRange  # training, to the raw loop in fp32
    tick_ratio: MedianRange
    other_share: MedianRange
    peak_mib: float | None

    def cells(self) -> list[str]:
        """Return the cells of the printed table."""
        return [
            *(self.case, str(self.hosts), self.seeds, self.executor),
            *(self.env_steps_per_s.show(1), f"{self.images_per_s.middle:,.0f}"),
            *(self.train_ratio.show(2), self.fp32_ratio.show(2), self.tick_ratio.show(2)),
            f"{self.other_share.middle:.1%}",
            "–" if self.peak_mib is None else f"{self.peak_mib:,.0f}",
        ]


COLUMNS = {"case": 6, "hosts": 5, "seeds": 9, "executor": 22, "env steps/s": 23, "images/s": 10, "train / raw": 20,
           "train / raw fp32": 20, "tick / raw": 20, "other": 6, "MiB": 6}  # fmt: skip
"""Headings and widths of the printed table."""


def line(cells: Sequence[str]) -> str:
    """Return a line of the printed table."""
    return " ".join(cell.ljust(width) for cell, width in zip(cells, COLUMNS.values(), strict=True)).rstrip()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    """Return the duration of one call in seconds."""
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begin


def step(pool: HostPool) -> Round:
    """Run one tick with the action WAIT on every host and return its times."""
    wait = to_action([(Op.WAIT,)] * pool.n_envs, pool.device)
    pool.clock.take_seconds()
    tick = seconds(lambda: pool.step(wait))
    phases = pool.clock.take_seconds()
    return Round(
        tick=tick,
        train=phases["train"],
        hosts=sum(spent for phase, spent in phases.items() if phase not in NON_HOST_PHASES),
    )


def raw_seconds(raw: RawLoop) -> dict[int, float]:
    """Return the seconds of one pass over all hosts, by the number of threads per operator."""
    times = {}
    for threads in {1, usable_cores() if DEVICE.type == "cpu" else 1}:
        torch.set_num_threads(threads)
        times[threads] = seconds(raw)
    torch.set_num_threads(1)
    return times


def measure_gpu_peak(build: Callable[[], HostPool]) -> tuple[HostPool, float]:
    """Return a pool and the peak GPU memory of the pool in its second tick, in MiB."""
    before = torch.cuda.memory_allocated()
    pool = build()
    step(pool)  # allocates the optimizers' state
    torch.cuda.reset_peak_memory_stats()
    step(pool)
    return pool, (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(name: str, hosts: int, repeats: int, precision: str, *, grown: bool) -> list[Row]:
    """Measure every executor on one case, without, with equal, and with different seeds. `grown`: the raw loop, too."""
    case = CASES[name]
    data = case.task.load().copy_to([DEVICE])
    alone = {wanted: RawLoop(case, data, hosts, wanted) for wanted in dict.fromkeys((precision, "fp32"))}
    raws = {key: alone[key[1]] for key in product(SEED_PLACEMENTS, alone)}
    auto = make_pool(case, data, hosts, ExecutorChoice("auto", True), "none", precision).executor_choice
    pools: dict[tuple[SeedPlacement, ExecutorChoice], HostPool] = {}
    peaks: dict[tuple[SeedPlacement, ExecutorChoice], float | None] = {}
    for seeds, choice in product(SEED_PLACEMENTS, choices(case, DEVICE)):
        key = seeds, choice
        build = partial(make_pool, case, data, hosts, choice, seeds, precision)
        try:
            if DEVICE.type == "cuda":
                pools[key], peaks[key] = measure_gpu_peak(build)
            else:
                pools[key] = build()
                step(pools[key])
                peaks[key] = None
        except ValueError as error:
            pools.pop(key, None)
            print(f"{name}, {hosts} hosts, seeds {seeds}: {choice} refuses them: {error}", flush=True)
    for (seeds, choice), pool in pools.items():
        if grown and choice.executor == "loop":
            for wanted in alone:
                networks = [deepcopy(env.network).train() for env in pool.envs]
                raws[seeds, wanted] = RawLoop(case, data, hosts, wanted, grown=networks)
    plain: dict[RawLoop, list[dict[int, float]]] = {raw: [] for raw in raws.values()}
    for raw in plain:
        raw_seconds(raw)
    rounds: dict[tuple[SeedPlacement, ExecutorChoice], list[Round]] = {key: [] for key in pools}
    for _ in range(repeats):
        for raw, times in plain.items():
            times.append(raw_seconds(raw))
        for key, pool in pools.items():
            rounds[key].append(step(pool))
    images = hosts * BATCHES * BATCH
    fastest = {raw: [min(times.values()) for times in own] for raw, own in plain.items()}
    for raw, times in fastest.items():
        speed = spread([images / s for s in times]).show(0)
        seeds = ", ".join(seeds for seeds, wanted in raws if raws[seeds, wanted] is raw)
        wins = Counter(min(times, key=times.__getitem__) for times in plain[raw])
        threads = "; ".join(f"{n} thread(s) per operator in {won} of {repeats} rounds" for n, won in wins.items())
        computed = f"raw loop in {raw.settings.precision}, {speed} images/s"
        print(f"{name}, {hosts} hosts, seeds {seeds}: {computed}; {threads}")
    return [
        Row(
            *(name, hosts, key[0], f"{key[1]}{' *' if key[1].executor == auto else ''}"),
            env_steps_per_s=spread([hosts / spent.tick for spent in own]),
            images_per_s=spread([images / spent.train for spent in own]),
            train_ratio=spread([s / spent.train for s, spent in zip(same, own, strict=True)]),
            fp32_ratio=spread([s / spent.train for s, spent in zip(fp32, own, strict=True)]),
            tick_ratio=spread([s / spent.tick for s, spent in zip(same, own, strict=True)]),
            other_share=spread([1.0 - spent.hosts / spent.tick for spent in own]),
            peak_mib=peaks[key],
        )
        for key, own in rounds.items()
        for same, fp32 in [[fastest[raws[key[0], wanted]] for wanted in (precision, "fp32")]]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="kinds of host; without it, all")
    parser.add_argument("--hosts", nargs="+", type=int, default=HOSTS[DEVICE.type], help="numbers N of hosts")
    parser.add_argument("--grown", action="store_true", help="the raw loop trains the same networks with their seeds")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of measurement")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="what hosts compute in")
    parser.add_argument("--markdown", action="store_true", help="in the end print the table as Markdown")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    print(line(list(COLUMNS)))
    for case, hosts in product(args.case, args.hosts):
        found = measure(case, hosts, args.repeats, args.precision, grown=args.grown)
        for row in found:
            print(line(row.cells()), flush=True)
        rows += found
    if args.markdown:
        table = [list(COLUMNS), ["---"] * len(COLUMNS), *(row.cells() for row in rows)]
        print("\n".join(f"| {' | '.join(cells)} |" for cells in table))


if __name__ == "__main__":
    main()
