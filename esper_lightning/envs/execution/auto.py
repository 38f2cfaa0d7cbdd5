"""The fastest executor for a pool: measured on its own hosts, or known from an earlier run."""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from torch import Tensor

from esper_lightning.envs.actions import STYLES
from esper_lightning.envs.execution.choice import Choice
from esper_lightning.envs.execution.loop import LoopExecutor
from esper_lightning.envs.execution.remembered import describe, recall, remember
from esper_lightning.envs.execution.threads import usable_cores
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import Task, TaskData

SECONDS = 1.0
"""For all candidates together, once each has had a turn: enough to tell apart what differs by a tenth, and little next
to the minutes of a run."""

LONG = 5.0
"""Seconds of such a turn of all beyond which there is no second one: what is slow only the first time hardly counts."""

FIRST, HALF = 4, 0.5
"""Hosts of a trial, and the share of the best speed that a candidate must reach in it: on heavy hosts one that is far
slower would take most of the time. With more hosts no executor gets slower by the host."""

BATCHES = 4
"""Minibatches that are measured, beside a single one: from both follows what a whole epoch takes. To multiply what some
take would multiply what an executor does once an epoch."""

GROWN = (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED)
"""Stages of the seeds on measured hosts: those in which a seed spends its life, in this order."""


class Candidate(NamedTuple):
    """A choice that was tried."""

    choice: Choice
    speed: float  # environment steps per second; 0 if it was refused
    refused: str | None = None  # why these hosts cannot be executed so


class Selection(NamedTuple):
    """Which choice a pool got."""

    choice: Choice
    tried: list[Candidate]  # nothing if the choice was remembered
    note: str

    def report(self) -> list[RenderableType]:
        """For people: what was measured, if anything, why candidates were refused, and the note."""
        if not self.tried:
            return [self.note]
        slowest = min(candidate.speed for candidate in self.tried if candidate.speed)
        table = Table(title="executors on this run's hosts, with seeds of all kinds")
        table.add_column("executor", no_wrap=True)
        for heading in ("environment steps/s", "over the slowest"):
            table.add_column(heading, justify="right")
        for choice, speed, refused in self.tried:
            figures = ("refused", "") if refused else (f"{speed:.1f}", f"{speed / slowest:.2f}")
            table.add_row(f"{'→' if choice == self.choice else ' '} {choice}", *figures)
        refusals = dict.fromkeys(candidate.refused for candidate in self.tried if candidate.refused)
        return [table, *refusals, self.note]


def select(
    envs: Sequence[HostEnv], growable: Tensor, task: Task, data: TaskData, possible: Sequence[Choice]
) -> Selection:
    """The fastest of `possible` for these environments, which must be reset before they are used for anything else.

    Args:
        envs: All that a pool has.
        growable: Which blueprint can grow in which slot [K, blueprints].
        task, data: What their hosts learn.
        possible: See `candidates`.
    """
    key = describe(envs[0], data, len(envs), possible)
    known, complaint = recall(key, possible)
    if known is not None:
        return Selection(known, [], f"executor {known}: the fastest when it was measured for hosts like these")
    tried = measure(envs, growable, task, data, possible)
    fastest = max(tried, key=lambda candidate: candidate.speed).choice
    return Selection(fastest, tried, complaint + remember(key, fastest, {str(c): speed for c, speed, _ in tried}))


def measure(
    envs: Sequence[HostEnv], growable: Tensor, task: Task, data: TaskData, possible: Sequence[Choice]
) -> list[Candidate]:
    """Lets each choice train and validate the hosts, while seeds of all kinds grow on them.

    Raises ValueError, with the first one's reason, if every choice refuses them.
    """
    executors: dict[Choice, LoopExecutor] = {}
    speeds: dict[Choice, float] = {}
    refused: dict[Choice, str] = {}
    for choice in possible:
        with _noting(choice, refused):
            executor = choice.make(task, envs[0].training)
            envs[0].reset(0)
            executor.validate(envs[:1], data.validation)  # as in a run: it meets a host that is new
            speed(executor, envs[:1], data)
            executors[choice] = executor
    _germinate(envs, growable.tolist())
    with _undisturbed():
        for choice, executor in executors.items():
            with _noting(choice, refused):
                speeds[choice] = speed(executor, envs[:FIRST], data)
        if not speeds:
            raise ValueError(refused[possible[0]])
        for choice in _behind(speeds):  # again: it may have been its start that took the time
            speeds[choice] = max(speeds[choice], speed(executors[choice], envs[:FIRST], data))
        fast = {choice: executors[choice] for choice in speeds if choice not in _behind(speeds)}
        speeds |= _compare(fast, envs, data)
    for env in envs:
        env.growing.clear()
        env.optimizer.zero_grad()
        env.optimizer.state.clear()
    return [Candidate(choice, speeds.get(choice, 0.0), refused.get(choice)) for choice in possible]


def _behind(speeds: Mapping[Choice, float]) -> list[Choice]:
    """Those that a trial rules out."""
    return [choice for choice, found in speeds.items() if found < HALF * max(speeds.values())]


def _compare(executors: Mapping[Choice, LoopExecutor], envs: Sequence[HostEnv], data: TaskData) -> dict[Choice, float]:
    """The best speed of each; they take turns, so that whatever else the machine does meets all of them."""
    # Hosts that say how fast all are, where time grows evenly with their number.
    enough = {"loop": 8, "threads": 4 * usable_cores(), "streams": 64}

    def turn() -> dict[Choice, float]:
        some = {choice: envs[: enough.get(choice.executor, len(envs))] for choice in executors}
        return {choice: speed(executor, some[choice], data) for choice, executor in executors.items()}

    begin = time.perf_counter()
    best = turn()
    first = time.perf_counter()
    while first - begin < LONG and time.perf_counter() < first + SECONDS:
        best = {choice: max(found, best[choice]) for choice, found in turn().items()}
    return best


@contextmanager
def _noting(choice: Choice, refused: dict[Choice, str]) -> Iterator[None]:
    """What an executor cannot do, or has no memory for, is a refusal."""
    try:
        yield
    except (ValueError, MemoryError) as error:
        refused[choice] = str(error)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without Python's search for garbage, which takes longer than a tick: 0.3 s in a process with Lightning."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _germinate(envs: Sequence[HostEnv], growable: Sequence[Sequence[bool]]) -> None:
    """Seeds of all kinds and stages by turns, in every second slot: the first hosts are like all hosts."""
    number = 0
    for i, env in enumerate(envs):
        for slot, possible in list(zip(env.slots, growable, strict=True))[i % 2 :: 2]:
            blueprints = [name for name, grows in zip(env.space.blueprint, possible, strict=True) if grows]
            if not blueprints:  # a place that only hosts of another task have
                continue
            curve, style = STYLES[env.space.style[number % len(env.space.style)]]
            turn, kind = divmod(number, len(blueprints))
            env.growing.germinate(slot.name, blueprints[kind], style=style, curve=curve)
            for stage in GROWN[: 1 + (turn + kind) % len(GROWN)]:
                slot.move_to(stage)
            number += 1


def speed(executor: LoopExecutor, envs: Sequence[HostEnv], data: TaskData) -> float:
    """Environment steps per second. Raises MemoryError if a host runs out of memory."""
    for env in envs:
        env.failure = None  # another executor's
    training = envs[0].training
    epoch = training.batches or data.train.samples // training.batch_size
    few = min(epoch, BATCHES)

    def train(batches: int) -> float:
        begin = time.perf_counter()
        for env in envs:
            env.training = replace(training, batches=batches)
        executor.train_epoch(envs, data.train).cpu()
        return time.perf_counter() - begin

    try:
        one, some = train(1), train(few)
    finally:
        for env in envs:
            env.training = training
    begin = time.perf_counter()
    executor.validate(envs, data.validation).cpu()  # after it all kernels are done, those of training too
    validation = time.perf_counter() - begin
    for env in envs:
        if env.failure is not None:  # it did nothing, and that is fast
            raise MemoryError(env.failure)
    batch = max(some - one, 0.0) / max(few - 1, 1)
    return len(envs) / (some + batch * (epoch - few) + validation)
