"""How well does the Governor tell hosts that diverge from hosts that learn, and what does it cost?

    python -m benchmarks.governor                        # all of it: half an hour of one core
    python -m benchmarks.governor --part recorded --traces FILE     # recorded once, judged as often as you like
    python -m benchmarks.governor --part live --markdown

recorded: hosts of several kinds are trained on real data while seeds grow on them, and what the Governor would have
    seen is recorded, though nobody acts on it. A host is *healthy* unless for three ticks running it loses more than
    1.5 times what guessing would: a standard that no rule of the Governor knows of. A rollback of a healthy host is a
    false one. Into copies of the healthy traces faults are injected, each at a random tick from the fourth to the last
    but two.
live: hosts are broken while they train, under the Governor.
cost: share of a tick that judging and snapshots take.
"""

import argparse
import inspect
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.hosts import CASES, make_pool
from esper_lightning.envs import ActionConfig, EnvConfig, HostFactory, HostPool
from esper_lightning.envs.execution.choice import Choice
from esper_lightning.envs.guard import Guard
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.training import HostTraining
from esper_lightning.governor import Decision, GovernorConfig, Reading, Verdict
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.hosts import CNN, GPT, MLP
from esper_lightning.tamiyo.baselines import RandomValid, WaitOnly
from esper_lightning.tamiyo.heuristic import Heuristic
from esper_lightning.tasks import Digits, Split, Task, TaskData

CPU = torch.device("cpu")

PATIENCE = 3
"""Ticks within which a fault should be found."""


class Text(Task):
    """Which character of a Python source comes next, 32 at a time."""

    LENGTH = 32

    def load(self) -> TaskData:
        letters = inspect.getsource(argparse)  # real text that every Python has
        alphabet = sorted(set(letters))
        codes = torch.tensor([alphabet.index(letter) for letter in letters])
        rows = codes[: (len(codes) - 1) // self.LENGTH * self.LENGTH].view(-1, self.LENGTH)
        following = codes[1 : rows.numel() + 1].view(-1, self.LENGTH)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        parts = order[:128], order[128:256], order[256:]
        test, validation, train = (Split(rows[part], following[part]) for part in parts)
        return TaskData(train, validation, test, len(alphabet))


class Kind(NamedTuple):
    """Hosts of one kind, and how they learn."""

    task: Task
    host: HostFactory
    training: dict[str, Any]


tiny = partial(CNN, base=4, kernel=1, pools=2, isolate=False, channels_last=False)
"""The host of configs/digits.yaml."""
small = partial(CNN, base=8, channels_last=False)
mlp = partial(MLP, width=64)
gpt = partial(GPT, width=32, blocks=2, heads=2, context=Text.LENGTH)

FEW = Digits(validation=500, test=1100)
"""With 197 training images: hosts that learn them by heart."""

KINDS = {
    "CNN 1×1, 390 parameters, Adam .005": Kind(Digits(), tiny, {"lr": 0.005}),
    "CNN 1×1, 390 parameters, Adam .02": Kind(Digits(), tiny, {"lr": 0.02}),
    "CNN 1×1, 390 parameters, Adam .05": Kind(Digits(), tiny, {"lr": 0.05}),
    "CNN 1×1, 390 parameters, Adam .02, batches of 8": Kind(Digits(), tiny, {"lr": 0.02, "batch_size": 8}),
    "CNN 1×1, 390 parameters, Adam .02, 24 batches a tick": Kind(Digits(), tiny, {"lr": 0.02, "batches": 24}),
    "CNN 3×3, base 8, Adam .002": Kind(Digits(), small, {"lr": 0.002}),
    "CNN 3×3, base 8, Adam .02": Kind(Digits(), small, {"lr": 0.02}),
    "CNN 3×3, base 8, Adam .02, 24 batches a tick": Kind(Digits(), small, {"lr": 0.02, "batches": 24}),
    "CNN 3×3, base 8, SGD .05": Kind(Digits(), small, {"lr": 0.05, "optimizer": "sgd"}),
    "CNN 3×3, base 8, Adam .02, 197 images": Kind(FEW, small, {"lr": 0.02}),
    "MLP of width 64, Adam .002": Kind(Digits(), mlp, {"lr": 0.002}),
    "MLP of width 64, Adam .02": Kind(Digits(), mlp, {"lr": 0.02}),
    "MLP of width 64, Adam .01, 197 images": Kind(FEW, mlp, {"lr": 0.01}),
    "GPT of width 32 on text, Adam .003": Kind(Text(), gpt, {"lr": 0.003}),
}

ACTIONS = ActionConfig(
    styles=["linear_add", "sigmoid12_multiply", "linear_gate"],
    tempos={"FAST": 2, "SLOW": 5},
    set_alpha=True,
    slow_cull=True,
)
"""Every op but ADVANCE, and every head."""

QUICK = LifecycleConfig(training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0)
"""As in configs/digits.yaml: short episodes, and it is for the controller to judge seeds."""

CONTROLLERS: dict[str, tuple[Callable[[], Any], LifecycleConfig]] = {
    "random": (lambda: RandomValid(0), QUICK),
    "random, born at random": (lambda: RandomValid(1), replace(QUICK, birth="random")),
    "heuristic": (Heuristic, LifecycleConfig()),
    "wait": (WaitOnly, QUICK),
}

EPISODES = {12: (20, 14, 8, 8), 40: (12, 8, 5, 5)}
"""By horizon: hosts of each kind under each controller."""


class Seen(NamedTuple):
    """What the Governor is told of a tick."""

    reading: Reading
    skipped_steps: int
    alphas: list[float]

    @property
    def loss(self) -> float:
        return self.reading.loss


class Trace(NamedTuple):
    """One episode of one host."""

    kind: str
    controller: str
    horizon: int
    chance: float
    steps: int  # in a tick
    ticks: list[Seen]

    @property
    def healthy(self) -> bool:
        """See the top of this file."""
        limit = 1.5 * self.chance
        losses = [seen.loss for seen in self.ticks]
        return all(map(math.isfinite, losses)) and not any(
            min(losses[i : i + 3]) > limit for i in range(len(losses) - 2)
        )

    @property
    def weight_lost(self) -> list[bool]:
        """By tick: was there less of a seed in the host's output than in the tick before?"""
        alphas = [self.ticks[0].alphas, *(seen.alphas for seen in self.ticks)]
        return [
            any(now < before for now, before in zip(alphas[i + 1], alphas[i], strict=True))
            for i in range(len(self.ticks))
        ]


class Recorder(Guard):
    """Sees what a Guard sees, finds everything healthy and keeps nothing."""

    def begin(self) -> None:
        super().begin()
        self.ticks: list[Seen] = []

    def vet(self, op: str, growth: float) -> list[str]:
        return []

    def judge(self, reading: Reading, skipped_steps: int, alphas: list[float]) -> Verdict:
        self.ticks.append(Seen(reading, skipped_steps, alphas))
        return Verdict(Decision.HEALTHY, "", reading.loss, math.nan, math.nan, 0, 0)

    def keep(self, state: dict[str, Any]) -> None:
        pass


def open_pool(kind: Kind, horizon: int, hosts: int, lifecycle: LifecycleConfig, executor: str) -> HostPool:
    """Hosts of one kind, under a Governor with its defaults."""
    training = HostTraining(**{"batches": 8, "max_grad_norm": None, "onednn": False} | kind.training)
    config = EnvConfig(horizon=horizon, executor=executor, training=training, lifecycle=lifecycle, actions=ACTIONS)
    return HostPool(kind.task, kind.task.load(), kind.host, config, hosts, CPU)


def record(kind: str, controller: str, horizon: int, hosts: int) -> list[Trace]:
    """Episodes that nobody watches over."""
    make, lifecycle = CONTROLLERS[controller]
    pool, acting = open_pool(KINDS[kind], horizon, hosts, lifecycle, "fused"), make()
    for env in pool.envs:
        env.guard = Recorder(env.guard.config, env.guard.chance, env.guard.steps)
    first = 1000 * list(CONTROLLERS).index(controller) + 100 * horizon
    pool.reset(range(first, first + hosts))
    acting.reset(pool)
    for _ in range(horizon):
        pool.step(acting.act(pool))
    return [Trace(kind, controller, horizon, env.guard.chance, env.guard.steps, env.guard.ticks) for env in pool.envs]


def record_all() -> Iterator[Trace]:
    """Of every kind, under every controller, over short and long episodes."""
    for (horizon, numbers), kind in product(EPISODES.items(), KINDS):
        for controller, hosts in zip(CONTROLLERS, numbers, strict=True):
            yield from record(kind, controller, horizon, hosts)
        print(f"recorded: {horizon} ticks, {kind}", flush=True)


def save(traces: Sequence[Trace], path: Path) -> None:
    path.write_text(json.dumps(traces))


def load(path: Path) -> list[Trace]:
    def seen(reading: list, skipped_steps: int, alphas: list[float]) -> Seen:
        loss, train_loss, gradients, *flags = reading
        return Seen(Reading(loss, train_loss, tuple(gradients), *flags), skipped_steps, alphas)

    return [Trace(*rest, [seen(*tick) for tick in ticks]) for *rest, ticks in json.loads(path.read_text())]


def first_rollback(trace: Trace, ticks: Sequence[Seen], config: GovernorConfig) -> tuple[int, str] | None:
    """In which tick (from 0 on) the Governor would have stepped in, and why; None: never."""
    guard = Guard(config, trace.chance, trace.steps)
    for i, seen in enumerate(ticks):
        verdict = guard.judge(*seen)
        if verdict.diverged:
            return i, verdict.cause
    return None


def with_losses(ticks: Sequence[Seen], begin: int, losses: Sequence[float]) -> list[Seen]:
    """A copy in which these are the losses from tick `begin` on."""
    changed = list(ticks)
    for i, loss in enumerate(losses, begin):
        changed[i] = ticks[i]._replace(reading=ticks[i].reading._replace(loss=loss))
    return changed


class Fault(NamedTuple):
    """Something that is injected into a trace."""

    name: str
    inject: Callable[[Trace, int, random.Random], list[Seen] | None]  # None: makes no sense here
    within: int  # ticks in which it should be found; 0: not at all


def level(trace: Trace, tick: int) -> float:
    """What was normal up to a tick: the mean loss of the three before it."""
    return fmean(seen.loss for seen in trace.ticks[tick - 3 : tick])


def not_a_number(value: float, field: str, trace: Trace, tick: int, _: random.Random) -> list[Seen]:
    ticks = list(trace.ticks)
    wrong = (value,) if field == "gradients" else value
    ticks[tick] = ticks[tick]._replace(reading=ticks[tick].reading._replace(**{field: wrong}))
    return ticks


def spike(factor: float, length: int | None, trace: Trace, tick: int, rng: random.Random) -> list[Seen]:
    """`factor` times what was normal, give or take 5 %, for `length` ticks or to the end."""
    normal, length = level(trace, tick), length or len(trace.ticks) - tick
    losses = [factor * normal * rng.uniform(0.95, 1.05) for _ in range(length)]
    return with_losses(trace.ticks, tick, losses)


def collapse(trace: Trace, tick: int, rng: random.Random) -> list[Seen] | None:
    """The loss of guessing, give or take 3 %, in a host that had learned."""
    if level(trace, tick) > 0.6 * trace.chance:
        return None
    losses = [trace.chance * rng.uniform(0.97, 1.03) for _ in trace.ticks[tick:]]
    return with_losses(trace.ticks, tick, losses)


FACTORS = (3, 5, 10, 30, 100)

FAULTS = [
    *(
        Fault(f"{name} {value}", partial(not_a_number, value, field), 1)
        for field, name in (("loss", "loss"), ("train_loss", "training loss"), ("gradients", "gradient's norm"))
        for value in (math.nan, math.inf)
    ),
    *(Fault(f"spike of {factor} ×, held", partial(spike, factor, None), PATIENCE) for factor in FACTORS),
    Fault("collapse to guessing, held", collapse, PATIENCE),
    *(
        Fault(f"spike of {factor} ×, {length} tick{'s'[: length - 1]}", partial(spike, factor, length), 0)
        for length, factor in product((1, 2), FACTORS)
    ),
]


class Found(NamedTuple):
    """How often a fault was found in time, and how often it was injected."""

    found: int
    of: int

    def __str__(self) -> str:
        return f"{self.found:,} of {self.of:,} ({self.found / self.of:.1%})" if self.of else "–"

    def add(self, found: bool) -> "Found":
        return Found(self.found + found, self.of + 1)


def inject(
    fault: Fault, traces: Sequence[Trace], config: GovernorConfig, rng: random.Random
) -> dict[tuple[int, bool], Found]:
    """Found in time, or for spikes that mend themselves: rolled back; by horizon and by whether a seed lost weight in
    the host's output from three ticks before to two ticks after. Traces that are rolled back anyway are left out."""
    counts: dict[tuple[int, bool], Found] = defaultdict(lambda: Found(0, 0))
    for trace in traces:
        tick = rng.randrange(3, len(trace.ticks) - 2)
        changed = fault.inject(trace, tick, rng)
        if changed is None:
            continue
        where = first_rollback(trace, changed, config)
        last = tick + fault.within - 1 if fault.within else len(trace.ticks)
        moved = any(trace.weight_lost[max(0, tick - 3) : tick + 3])
        key = trace.horizon, moved
        counts[key] = counts[key].add(where is not None and tick <= where[0] <= last)
    return counts


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], markdown: bool) -> None:
    cells = [[str(cell) for cell in row] for row in rows]
    if markdown:
        lines = [columns, ["---"] * len(columns), *cells]
        print(f"\n{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
        return
    table = Table(*columns, title=title)
    for row in cells:
        table.add_row(*row)
    Console(width=140).print(table)


def judge_recorded(traces: Sequence[Trace], config: GovernorConfig, markdown: bool) -> None:
    healthy = [trace for trace in traces if trace.healthy]
    false = {id(trace): first_rollback(trace, trace.ticks, config) for trace in healthy}
    rows = []
    for kind, controller in [*((kind, None) for kind in KINDS), *((None, one) for one in CONTROLLERS), (None, None)]:
        row = [kind or controller or "all"]
        for horizon in (*EPISODES, None):
            among = [
                trace
                for trace in traces
                if kind in (None, trace.kind) and controller in (None, trace.controller)
                and horizon in (None, trace.horizon)
            ]  # fmt: skip
            well = [trace for trace in among if trace.healthy]
            row += [len(among) - len(well), Found(sum(false[id(trace)] is not None for trace in well), len(well))]
        rows.append(row)
    spans = [f"{horizon} ticks" for horizon in EPISODES] + ["both"]
    columns = [part for span in spans for part in (f"{span}: not healthy", "rolled back of healthy")]
    show("Hosts that nobody broke", ["hosts", *columns], rows, markdown)
    for trace in healthy:
        if false[id(trace)] is not None:
            tick, cause = false[id(trace)]
            around = " ".join(f"{seen.loss:.2f}" for seen in trace.ticks[max(0, tick - 5) : tick + 4])
            print(f"  {trace.kind}, {trace.controller}, tick {tick + 1} of {trace.horizon}: {cause}; … {around} …")
    sick = [trace for trace in traces if not trace.healthy]
    print(f"of {len(sick)} unhealthy hosts {sum(first_rollback(t, t.ticks, config) is not None for t in sick)} would "
          f"have been rolled back")  # fmt: skip
    clean, rng = [trace for trace in healthy if false[id(trace)] is None], random.Random(0)
    columns = ["injected", "should be found", *(f"{horizon} ticks" for horizon in EPISODES), "where a seed lost weight"]
    rows = []
    for fault in FAULTS:
        counts = inject(fault, clean, config, rng)
        calm = [counts[horizon, False] for horizon in EPISODES]
        moved = [counts[horizon, True] for horizon in EPISODES]
        within = {0: "never", 1: "at once"}.get(fault.within, f"in {fault.within} ticks")
        rows.append([fault.name, within, *calm, Found(*map(sum, zip(*moved, strict=True)))])
    show("Faults injected into recorded traces", columns, rows, markdown)


def fill(value: float, env: HostEnv) -> None:
    """Sets the host's weights."""
    with torch.no_grad():
        for parameter in env.optimizer.param_groups[0]["params"]:
            parameter.fill_(value)


def scale(factor: float, env: HostEnv) -> None:
    with torch.no_grad():
        for parameter in env.optimizer.param_groups[0]["params"]:
            parameter.mul_(factor)


def learn_faster(factor: float, env: HostEnv) -> None:
    for group in env.optimizer.param_groups:
        group["lr"] *= factor


def one_weight(value: float, env: HostEnv) -> None:
    with torch.no_grad():
        env.optimizer.param_groups[0]["params"][0].view(-1)[0] = value


BREAKS: dict[str, Callable[[HostEnv], None]] = {
    "one weight NaN": partial(one_weight, math.nan),
    "all weights NaN": partial(fill, math.nan),
    "all weights inf": partial(fill, math.inf),
    "all weights × 1000": partial(scale, 1000.0),
    "all weights 0": partial(fill, 0.0),
    "learning rate × 1000": partial(learn_faster, 1000.0),
}

WRONG_LABELS: dict[str, Callable[[Split, int], Split]] = {
    "labels off by one": lambda split, classes: split._replace(targets=(split.targets + 1) % classes),
    "labels drawn at random": lambda split, classes: split._replace(
        targets=torch.randint(classes, split.targets.shape, generator=torch.Generator().manual_seed(0))
    ),
}

LIVE = (
    "CNN 1×1, 390 parameters, Adam .005",
    "CNN 3×3, base 8, Adam .002",
    "CNN 3×3, base 8, Adam .02",
    "MLP of width 64, Adam .002",
    "GPT of width 32 on text, Adam .003",
)
"""Kinds that are broken while they train."""

BREAK_AT, AFTERWARDS = (4, 12), 10
"""Ticks that a host learns before it is broken, and for which it is watched after that."""


class Broken(NamedTuple):
    """What became of a host that was broken."""

    learned: bool  # the mean loss of the three ticks before was below 60 % of that of guessing
    tick: int | None  # of its rollback, counted from the break; None: not within `AFTERWARDS`


def break_live(kind: str, name: str, after: int, hosts: int) -> list[Broken]:
    """Breaks every host after so many ticks; those that were rolled back before are left out."""
    pool = open_pool(KINDS[kind], after + AFTERWARDS, hosts, QUICK, "fused")
    pool.reset(range(hosts))
    wait = WaitOnly()
    early = {word.host for _ in range(after) for word in pool.step(wait.act(pool)).verdicts if word.verdict.diverged}
    learned = [fmean(env.history.loss[-3:]) < 0.6 * math.log(pool.data.classes) for env in pool.envs]
    if name in WRONG_LABELS:
        wrong = WRONG_LABELS[name](pool.data.train, pool.data.classes)
        pool.data = pool.data._replace(train=wrong)
    else:
        for env in pool.envs:
            BREAKS[name](env)
    found: dict[int, int] = {}
    for tick in range(1, AFTERWARDS + 1):
        for word in pool.step(wait.act(pool)).verdicts:
            if word.verdict.diverged:
                found.setdefault(word.host, tick)
    return [Broken(learned[host], found.get(host)) for host in range(hosts) if host not in early]


def judge_live(hosts: int, markdown: bool) -> None:
    rows = []
    for name in (*BREAKS, *WRONG_LABELS):
        broken = [one for after, kind in product(BREAK_AT, LIVE) for one in break_live(kind, name, after, hosts)]
        row = [name]
        for learned in (True, False):
            ticks = [one.tick for one in broken if one.learned == learned]
            when = Counter(tick for tick in ticks if tick is not None)
            row.append(Found(sum(when[tick] for tick in range(1, PATIENCE + 1)), len(ticks)))
            row.append(", ".join(f"{tick}: {when[tick]}" for tick in sorted(when)))
        rows.append(row)
        print(f"broken: {name}", flush=True)
    columns = [f"{who}: found in {PATIENCE} ticks" for who in ("had learned", "had not")]
    columns = ["what was done", columns[0], "in tick: hosts", columns[1], "in tick: hosts"]
    show("Hosts broken while they train", columns, rows, markdown)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("recorded", "live", "cost"), help="without it, all three")
    parser.add_argument("--traces", type=Path, help="recorded traces: read from this file, or written if there is none")
    parser.add_argument("--hosts", type=int, default=8, help="live: hosts of each kind, for each way to break them")
    parser.add_argument("--rounds", type=int, default=7, help="cost: rounds of measurement")
    parser.add_argument("--markdown", action="store_true", help="tables to paste")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part in (None, "recorded"):
        if args.traces and args.traces.exists():
            traces = load(args.traces)
        else:
            traces = list(record_all())
            if args.traces:
                save(traces, args.traces)
        judge_recorded(traces, GovernorConfig(), args.markdown)
    if args.part in (None, "live"):
        judge_live(args.hosts, args.markdown)
    if args.part in (None, "cost"):
        measure_costs(args.rounds, args.markdown)


if __name__ == "__main__":
    main()
