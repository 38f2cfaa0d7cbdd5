"""Executor `auto`: the choice of the fastest executor for a pool.

The speeds are measured on the pool's own hosts before the first rollout. The choice is cached in a file, by machine,
software and hosts, and a resumed run continues with the executor that it had.
"""

import gc
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from rich.console import RenderableType
from rich.table import Table
from torch import Tensor, nn

from esper_lightning.envs.config import REQUIRED_DEVICE_TYPE, STACKING_EXECUTORS, TRIAL_EXECUTORS
from esper_lightning.envs.execution import EXECUTORS
from esper_lightning.envs.execution.fused.arena import leave_arena
from esper_lightning.envs.execution.loop import LoopExecutor
from esper_lightning.envs.execution.threads import usable_cores
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import ConvolutionMethod, HostTraining
from esper_lightning.envs.spaces.actions import STYLES
from esper_lightning.growth.blend import Isolation
from esper_lightning.growth.stages import Stage
from esper_lightning.serialization.replace import replace_file
from esper_lightning.tasks import Task, TaskData

PER_HOST_EXECUTORS = frozenset({"loop", "threads", "streams"})
"""Executors that compute each host separately by the same operations: with the same kernels their results are equal."""

FILE_FORMAT = 1
"""Version of the file format; a file of another version is replaced."""

SPEED_NEUTRAL_SETTINGS = frozenset(
    {"lr", "lr_schedule", "seed_lr_factor", "weight_decay", "momentum", "carry_over", "onednn", "convolutions"}
)
"""Fields of `HostTraining` that do not affect speed, or that belong to the candidates."""

COMPARISON_SECONDS = 1.0
"""Seconds of repeated measurement of all candidates together, after each was measured once.

Enough to distinguish speeds that differ by 10 %, and short next to the minutes of a run."""

MAX_FIRST_ROUND_SECONDS = 5.0
"""If the first round of all candidates takes longer than this (s), it is not repeated: start-up cost is negligible."""

TRIAL_HOSTS, MIN_RELATIVE_SPEED = 4, 0.5
"""Number of hosts in the trial, and the fraction of the best speed that a candidate must reach there.

With heavy hosts a far slower candidate would take most of the time. No executor takes longer per host with more
hosts."""

TIMED_BATCHES = 4
"""Number of minibatches in the longer of two timings; the other one has a single minibatch.

The difference extrapolates to a whole epoch without multiplying what an executor does once per epoch."""

SEED_STAGES = (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED)
"""Stages of the seeds on measured hosts, in the order of a seed's life."""


class ExecutorChoice(NamedTuple):
    """Executor and its kernels."""

    executor: str
    onednn: bool
    convolutions: ConvolutionMethod | None = None  # as in `HostTraining`; None for all executors but fused

    def __str__(self) -> str:
        methods = {"grouped": ["with grouped convolutions"], "products": ["with products"], None: []}
        kernels = [*methods[self.convolutions], *([] if self.onednn else ["without oneDNN"])]
        return " ".join([self.executor, ", ".join(kernels)]).rstrip()

    def gives_same_results(self, other: "ExecutorChoice") -> bool:
        """Return whether both choices give the same results bit for bit, and not only within a tolerance."""
        same_operations = self.executor == other.executor or {self.executor, other.executor} <= PER_HOST_EXECUTORS
        return same_operations and (self.onednn, self.convolutions) == (other.onednn, other.convolutions)

    def make(self, task: Task, training: HostTraining) -> LoopExecutor:
        """Create the executor. Raises ValueError if it does not support the training settings."""
        settings = replace(training, onednn=self.onednn, convolutions=self.convolutions)
        return EXECUTORS.find(self.executor)(task, settings)


def available_choices(
    device: torch.device,
    training: HostTraining,
    isolation: Isolation = "straight_through",
    *,
    convolutional: bool = False,
) -> list[ExecutorChoice]:
    """Return the choices that a device, the training settings and the isolation of seeds allow.

    The first is the reference.

    Args:
        device: Device of the hosts.
        training: Settings of their training.
        isolation: How seeds are isolated.
        convolutional: Hosts have convolutions, for whose computation executor fused has several methods.
    """
    device_options = {"cpu": [True, False]}.get(device.type, [True])  # oneDNN only affects the CPU
    onednn_options = device_options if training.onednn is None else [training.onednn]
    methods: list[ConvolutionMethod | None] = [training.convolutions]
    if convolutional and training.convolutions is None:
        methods += get_args(ConvolutionMethod)
    names = [
        name
        for name in EXECUTORS
        if name not in EXECUTORS.registered and (isolation != "trial" or name in TRIAL_EXECUTORS)
    ]
    return [
        ExecutorChoice(name, on, method)
        for name in names
        if REQUIRED_DEVICE_TYPE.get(name) in (None, device.type)
        for on in onednn_options
        for method in (methods if name in STACKING_EXECUTORS else [None])
    ]


def resume_choice(
    saved: ExecutorChoice, chosen: ExecutorChoice, available: Sequence[ExecutorChoice]
) -> tuple[ExecutorChoice, str | None]:
    """Return the choice with which a resumed run continues, and a message if the choice needs one.

    Args:
        saved: The choice of the run so far.
        chosen: The choice that a new run would use.
        available: The choices that this machine and these settings allow.
    """
    if saved == chosen:
        return chosen, None
    if saved in available:
        return (
            saved,
            f"executor {saved}, as the run so far, not {chosen}: so it continues as if it had not been stopped",
        )
    if saved.gives_same_results(chosen):
        return chosen, None
    return (
        chosen,
        f"executor {chosen}, the run so far had {saved}: it continues within their tolerance, not bit for bit",
    )


def cache_file() -> Path:
    """Return the path of the cache file, below `XDG_CACHE_HOME` (default: `~/.cache`)."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "esper-lightning" / "executors.json"


def cache_key(
    env: HostEnv, data: TaskData, n_envs: int, *, available: Sequence[ExecutorChoice], devices: int = 1
) -> str:
    """Return the cache key: everything that the speed of new environments like `env` depends on.

    Args:
        env: One of the environments.
        data: Their data.
        n_envs: Number of environments.
        available: Choices that are compared.
        devices: Number of devices like that of `env` on which they train.
    """
    machine = f"{_processor_name()}, {usable_cores()} cores, {torch.get_num_threads()} per operator"
    device = {"cuda": torch.cuda.get_device_name}.get(env.device.type, str)(env.device)
    software = f"torch {version('torch')} on {f'{devices} × ' if devices > 1 else ''}{device}"
    kind = hashlib.sha256(repr(_host_signature(env, data)).encode()).hexdigest()[:12]
    return f"{machine}; {software}; {n_envs} hosts of kind {kind}; {', '.join(map(str, available))}"


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _host_signature(env: HostEnv, data: TaskData) -> list[Any]:
    settings = [
        (f.name, getattr(env.training, f.name)) for f in fields(HostTraining) if f.name not in SPEED_NEUTRAL_SETTINGS
    ]
    splits = [(tuple(part.shape), part.dtype) for split in (data.train, data.validation) for part in split]
    layers = [_layer_signature(name, module) for name, module in env.network.named_modules()]
    return [layers, settings, splits, env.space.blueprint, env.space.style]


def _layer_signature(name: str, module: nn.Module) -> tuple[str, str, list[Any], list[Any]]:
    """Return name, type, plain attributes, and shapes of the own parameters and buffers of a module."""
    attributes = {key: value for key, value in vars(module).items() if isinstance(value, int | float | str | tuple)}
    own_tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    shapes = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in own_tensors]
    return name, type(module).__qualname__, sorted((k, v) for k, v in attributes.items() if k != "training"), shapes


def load_choice(key: str, available: Sequence[ExecutorChoice]) -> tuple[ExecutorChoice | None, str]:
    """Return the cached choice for `key`, or None if there is none to use, and a warning if the file is damaged."""
    entries, warning = _read_cache(cache_file())
    if key not in entries:
        return None, warning
    by_name = {str(choice): choice for choice in available}
    cached = by_name.get(entries[key].get("fastest"))
    return cached, "" if cached else f"{cache_file()} was damaged and is mended; "


def store_choice(key: str, choice: ExecutorChoice, speeds: Mapping[str, float]) -> str:
    """Write the choice to the cache file, with all measured speeds in environment steps per second.

    Returns a note that names the file, or the reason why it could not be written.
    """
    path = cache_file()
    entry = {"fastest": str(choice), "environment steps per second": {name: round(v, 1) for name, v in speeds.items()}}
    content = {"format": FILE_FORMAT, "measured": _read_cache(path)[0] | {key: entry}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda draft: draft.write_text(json.dumps(content, indent=1) + "\n"))
    except OSError as error:
        return f"not remembered: {path} cannot be written ({error.strerror})"
    return f"remembered in {path}"


def _read_cache(path: Path) -> tuple[dict[str, Any], str]:
    """Return the cached entries by key, and a note if the file is damaged (empty: it is not)."""
    if not path.exists():
        return {}, ""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return {}, f"{path} could not be read ({type(error).__name__}) and is replaced; "
    entries = content.get("measured") if isinstance(content, dict) and content.get("format") == FILE_FORMAT else None
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        return {}, f"{path} was not of format {FILE_FORMAT} and is replaced; "
    return entries, ""


class MeasuredChoice(NamedTuple):
    """Measured speed of one choice, or the reason why the hosts cannot be executed that way."""

    choice: ExecutorChoice
    speed: float  # environment steps per second; 0 if refused
    refusal: str | None = None  # reason of the refusal


class Selection(NamedTuple):
    """Choice for a pool, with the measurements behind it."""

    choice: ExecutorChoice
    measured: list[MeasuredChoice]  # empty if the choice was cached
    note: str

    def report(self) -> list[RenderableType]:
        """Return console output: a table of the measured speeds if any, reasons of refusals, and the note."""
        if not self.measured:
            return [self.note]
        slowest = min(candidate.speed for candidate in self.measured if candidate.speed)
        table = Table(title="executors on this run's hosts, with seeds of all kinds")
        table.add_column("executor", no_wrap=True)
        for heading in ("environment steps/s", "over the slowest"):
            table.add_column(heading, justify="right")
        for choice, speed, refused in self.measured:
            cells = ("refused", "") if refused else (f"{speed:.1f}", f"{speed / slowest:.2f}")
            table.add_row(f"{'→' if choice == self.choice else ' '} {choice}", *cells)
        refusals = dict.fromkeys(candidate.refusal for candidate in self.measured if candidate.refusal)
        return [table, *refusals, self.note]


def select_executor(
    envs: Sequence[HostEnv], growable: Tensor, task: Task, *, data: TaskData, available: Sequence[ExecutorChoice]
) -> Selection:
    """Return the fastest choice for these environments, which must be reset before any other use.

    Args:
        envs: All environments of a pool.
        growable: True where a blueprint can grow in a slot, [K, blueprints] bool.
        task: Task of the hosts.
        data: Training and validation data of the hosts.
        available: Choices to compare, see `available_choices`.
    """
    devices = len({env.device for env in envs})
    key = cache_key(envs[0], data, len(envs), available=available, devices=devices)
    cached, warning = load_choice(key, available)
    if cached is not None:
        return Selection(cached, [], f"executor {cached}: the fastest when it was measured for hosts like these")
    measured = measure_choices(envs, growable, task, data=data, available=available)
    fastest = max(measured, key=lambda candidate: candidate.speed).choice
    return Selection(
        fastest, measured, warning + store_choice(key, fastest, {str(c): speed for c, speed, _ in measured})
    )


def measure_choices(
    envs: Sequence[HostEnv], growable: Tensor, task: Task, *, data: TaskData, available: Sequence[ExecutorChoice]
) -> list[MeasuredChoice]:
    """Measure how fast each choice trains and validates the hosts with seeds of all kinds and stages.

    Raises ValueError with the reason of the first choice if no choice can execute the hosts.
    """
    executors: dict[ExecutorChoice, LoopExecutor] = {}
    speeds: dict[ExecutorChoice, float] = {}
    refusals: dict[ExecutorChoice, str] = {}
    for choice in available:
        with _record_refusal(choice, refusals):
            executor = choice.make(task, envs[0].training)
            envs[0].reset(0)
            executor.validate(envs[:1], data.validation)  # as in a run, which first validates a host without seeds
            measure_speed(executor, envs[:1], data)
            executors[choice] = executor
    _germinate(envs, growable.tolist())
    with _garbage_collection_paused():
        for choice, executor in executors.items():
            with _record_refusal(choice, refusals):
                speeds[choice] = measure_speed(executor, envs[:TRIAL_HOSTS], data)
        if not speeds:
            raise ValueError(refusals[available[0]])
        for choice in _too_slow(speeds):  # a second time, because the first may have included start-up
            speeds[choice] = max(speeds[choice], measure_speed(executors[choice], envs[:TRIAL_HOSTS], data))
        fast_executors = {choice: executors[choice] for choice in speeds if choice not in _too_slow(speeds)}
        speeds |= _best_speeds(fast_executors, envs, data)
    for env in envs:
        env.growing.clear()
        env.optimizer.zero_grad()
        env.optimizer.state.clear()
        leave_arena(env.network, env.optimizer)
    return [MeasuredChoice(choice, speeds.get(choice, 0.0), refusals.get(choice)) for choice in available]


def _too_slow(speeds: Mapping[ExecutorChoice, float]) -> list[ExecutorChoice]:
    """Return the choices that the trial rules out as too slow."""
    return [choice for choice, speed in speeds.items() if speed < MIN_RELATIVE_SPEED * max(speeds.values())]


def _best_speeds(
    executors: Mapping[ExecutorChoice, LoopExecutor], envs: Sequence[HostEnv], data: TaskData
) -> dict[ExecutorChoice, float]:
    """Return the best speed of each choice, measured in turns so that other load on the machine affects all alike."""
    # For these executors time is linear in the number of hosts, so this many hosts are enough to measure them.
    sufficient_hosts = {"loop": 8, "threads": 4 * usable_cores(), "streams": 64}

    def measure_each() -> dict[ExecutorChoice, float]:
        subset = {choice: envs[: sufficient_hosts.get(choice.executor, len(envs))] for choice in executors}
        return {choice: measure_speed(executor, subset[choice], data) for choice, executor in executors.items()}

    start = time.perf_counter()
    best = measure_each()
    first_round_end = time.perf_counter()
    while (
        first_round_end - start < MAX_FIRST_ROUND_SECONDS and time.perf_counter() < first_round_end + COMPARISON_SECONDS
    ):
        best = {choice: max(speed, best[choice]) for choice, speed in measure_each().items()}
    return best


@contextmanager
def _record_refusal(choice: ExecutorChoice, refusals: dict[ExecutorChoice, str]) -> Iterator[None]:
    """Record a ValueError or MemoryError of an executor as a refusal."""
    try:
        yield
    except (ValueError, MemoryError) as error:
        refusals[choice] = str(error)


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pause Python's garbage collection, which takes longer than an environment step: 0.3 s with Lightning loaded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _germinate(envs: Sequence[HostEnv], growable: Sequence[Sequence[bool]]) -> None:
    """Germinate seeds of all kinds and stages by turns in every second slot, so that any first hosts are typical."""
    germinated = 0
    for i, env in enumerate(envs):
        for slot, is_growable in list(zip(env.slots, growable, strict=True))[i % 2 :: 2]:
            blueprints = [name for name, grows in zip(env.space.blueprint, is_growable, strict=True) if grows]
            if not blueprints:  # a padded slot: only hosts of another task have it
                continue
            curve, style = STYLES[env.space.style[germinated % len(env.space.style)]]
            cycle, blueprint_index = divmod(germinated, len(blueprints))
            env.growing.germinate(slot.name, blueprints[blueprint_index], style=style, curve=curve)
            for stage in SEED_STAGES[: 1 + (cycle + blueprint_index) % len(SEED_STAGES)]:
                slot.move_to(stage)
            germinated += 1


def measure_speed(executor: LoopExecutor, envs: Sequence[HostEnv], data: TaskData) -> float:
    """Return environment steps per second. Raises MemoryError if a host runs out of memory."""
    for env in envs:
        env.failure = None  # may be left from another executor
    training = envs[0].training
    epoch_batches = training.batches or data.train.samples // training.batch_size
    timed_batches = min(epoch_batches, TIMED_BATCHES)

    def train(batches: int) -> float:
        begin = time.perf_counter()
        for env in envs:
            env.training = replace(training, batches=batches)
        executor.train_epoch(envs, data.train).cpu()
        return time.perf_counter() - begin

    try:
        single_batch_seconds, timed_seconds = train(1), train(timed_batches)
    finally:
        for env in envs:
            env.training = training
    begin = time.perf_counter()
    executor.validate(envs, data.validation).cpu()  # waits for all kernels, those of training included
    validation_seconds = time.perf_counter() - begin
    for env in envs:
        if env.failure is not None:  # a failed host skips its work, so the timing would be too good
            raise MemoryError(env.failure)
    seconds_per_batch = max(timed_seconds - single_batch_seconds, 0.0) / max(timed_batches - 1, 1)
    return len(envs) / (timed_seconds + seconds_per_batch * (epoch_batches - timed_batches) + validation_seconds)
