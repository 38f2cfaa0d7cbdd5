"""Choice of the fastest executor for a pool: measured on its own hosts, or cached by an earlier run."""

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
"""Seconds of repeated measurement of all candidates together, after each was measured once.

Enough to distinguish speeds that differ by 10 %, and short next to the minutes of a run."""

LONG = 5.0
"""Seconds of the first round of all candidates beyond which it is not repeated: start-up cost then hardly counts."""

FIRST, HALF = 4, 0.5
"""Number of hosts in the trial, and the fraction of the best speed that a candidate must reach there.

With heavy hosts a far slower candidate would take most of the time. No executor takes longer per host with more
hosts."""

BATCHES = 4
"""Number of minibatches in the longer of two timings; the other one has a single minibatch.

The difference extrapolates to a whole epoch without multiplying what an executor does once per epoch."""

GROWN = (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED)
"""Stages of the seeds on measured hosts, in the order of a seed's life."""


class Candidate(NamedTuple):
    """Measured speed of one choice, or the reason why the hosts cannot be executed that way."""

    choice: Choice
    speed: float  # environment steps per second; 0 if refused
    refused: str | None = None  # reason of the refusal


class Selection(NamedTuple):
    """Choice for a pool, with the measurements behind it."""

    choice: Choice
    tried: list[Candidate]  # empty if the choice was cached
    note: str

    def report(self) -> list[RenderableType]:
        """Return console output: a table of the measured speeds if any, reasons of refusals, and the note."""
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
    """Return the fastest choice for these environments, which must be reset before any other use.

    Args:
        envs: All environments of a pool.
        growable: Whether a blueprint can grow in a slot [K, blueprints] bool.
        task: Task of the hosts.
        data: Training and validation data of the hosts.
        available: Choices to compare, see `available_choices`.
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
    """Measure how fast each choice trains and validates the hosts with seeds of all kinds and stages.

    Raises ValueError with the reason of the first choice if no choice can execute the hosts.
    """
    executors: dict[Choice, LoopExecutor] = {}
    speeds: dict[Choice, float] = {}
    refused: dict[Choice, str] = {}
    for choice in possible:
        with _noting(choice, refused):
            executor = choice.make(task, envs[0].training)
            envs[0].reset(0)
            executor.validate(envs[:1], data.validation)  # as in a run, which first validates a host without seeds
            speed(executor, envs[:1], data)
            executors[choice] = executor
    _germinate(envs, growable.tolist())
    with _undisturbed():
        for choice, executor in executors.items():
            with _noting(choice, refused):
                speeds[choice] = speed(executor, envs[:FIRST], data)
        if not speeds:
            raise ValueError(refused[possible[0]])
        for choice in _behind(speeds):  # a second time, because the first may have included start-up
            speeds[choice] = max(speeds[choice], speed(executors[choice], envs[:FIRST], data))
        fast = {choice: executors[choice] for choice in speeds if choice not in _behind(speeds)}
        speeds |= _compare(fast, envs, data)
    for env in envs:
        env.growing.clear()
        env.optimizer.zero_grad()
        env.optimizer.state.clear()
    return [Candidate(choice, speeds.get(choice, 0.0), refused.get(choice)) for choice in possible]


def _behind(speeds: Mapping[Choice, float]) -> list[Choice]:
    """Return the choices that the trial rules out as too slow."""
    return [choice for choice, found in speeds.items() if found < HALF * max(speeds.values())]


def _compare(executors: Mapping[Choice, LoopExecutor], envs: Sequence[HostEnv], data: TaskData) -> dict[Choice, float]:
    """Return the best speed of each choice, measured in turns so that other load on the machine affects all alike."""
    # For these executors time is linear in the number of hosts, and so many hosts suffice.
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
    """Record a ValueError or MemoryError of an executor as a refusal."""
    try:
        yield
    except (ValueError, MemoryError) as error:
        refused[choice] = str(error)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Pause Python's garbage collection, which takes longer than an environment step: 0.3 s with Lightning loaded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _germinate(envs: Sequence[HostEnv], growable: Sequence[Sequence[bool]]) -> None:
    """Germinate seeds of all kinds and stages by turns in every second slot, so that any first hosts are typical."""
    number = 0
    for i, env in enumerate(envs):
        for slot, possible in list(zip(env.slots, growable, strict=True))[i % 2 :: 2]:
            blueprints = [name for name, grows in zip(env.space.blueprint, possible, strict=True) if grows]
            if not blueprints:  # a padded slot: only hosts of another task have it
                continue
            curve, style = STYLES[env.space.style[number % len(env.space.style)]]
            turn, kind = divmod(number, len(blueprints))
            env.growing.germinate(slot.name, blueprints[kind], style=style, curve=curve)
            for stage in GROWN[: 1 + (turn + kind) % len(GROWN)]:
                slot.move_to(stage)
            number += 1


def speed(executor: LoopExecutor, envs: Sequence[HostEnv], data: TaskData) -> float:
    """Return environment steps per second. Raises MemoryError if a host runs out of memory."""
    for env in envs:
        env.failure = None  # may be left from another executor
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
    executor.validate(envs, data.validation).cpu()  # waits for all kernels, those of training included
    validation = time.perf_counter() - begin
    for env in envs:
        if env.failure is not None:  # a failed host skips its work, so the timing would be too good
            raise MemoryError(env.failure)
    batch = max(some - one, 0.0) / max(few - 1, 1)
    return len(envs) / (some + batch * (epoch - few) + validation)
