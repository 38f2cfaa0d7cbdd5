"""Measurements for the callback `Grow`: the user's metric with combinations of seeds.

Lightning's own loop validates the user's module once more, on batches that are kept in memory, so that hooks, batches
and logged metrics are those of any validation. Hooks of callbacks do not run, and loggers write nothing. Afterwards
trainer, module and random numbers are as they were before. A measurement proves itself, or is refused.
"""

import copy
import inspect
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from esper_lightning.growth.counterfactual import ScoreFunction, SeedVariant, active_seeds, measure_variants
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.param_groups import schedulers_in
from esper_lightning.runtime.nested import COPY_ERRORS, ExampleInput, batch_size, iter_tensors, map_tensors

SHARED = (Trainer, Strategy, LightningDataModule, Callback, Logger, Dataset, DataLoader, CombinedLoader, Optimizer)
"""Classes of what a module may hold and a measurement does not copy."""

LARGEST_COPIED = 2**16
"""Most elements of a parameter without gradient that is taken for state, such as a count, and copied."""

ATOMIC = (str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType, np.ndarray)
"""Types of values that refer to nothing else that a deep copy would copy."""

SMALLEST = 1e-12  # largest absolute difference of two measurements of the same network

ROUNDING = {True: 1e-4, False: 2e-3}
"""Largest relative difference of two measurements of the same network, by whether the precision is 32 bits or more."""

CHANCE, UNLIKE = 5.0, 0.25
"""A warning comes if a share on the first batches is further from that on all batches than so many standard errors, and
than this part of it."""

REREADINGS = 3  # further readings of the validation loader before a measurement that Lightning contradicts is refused


class KeptBatch(NamedTuple):
    """A batch as Lightning's validation loop takes it."""

    batch: Any
    batch_idx: int
    dataloader_idx: int


class VariantMeter:
    """Measures a network with combinations of its seeds, on the first `count` validation batches, kept in memory."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        network: nn.Module,
        *,
        monitor: str,
        is_share: bool,
        score: ScoreFunction | None,
        count: int,
    ) -> None:
        self.trainer, self.module, self.network = trainer, module, network
        self.monitor, self.score, self.count = monitor, score, count
        if trainer.val_dataloaders is None:  # they are loaded before the first validation, which may be far away
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
            trainer.training = True
        check_validation(trainer, module, by_validation_step=score is None)
        self.batches, are_all = read_batches(trainer, count)
        self._may_be_unlike = is_share and score is None and not are_all  # until a warning has said so
        # Whether a value that Lightning logs is of the same batches, so that it must equal what is measured here.
        self._is_comparable = score is None and trainer.strategy.reduce_boolean_decision(are_all)
        if self._is_comparable and self._batches_vary(readings=1):
            self._give_up_comparison()
        self.needs_proof = self._is_comparable
        """True until Lightning has logged what was measured, if it validates on the same batches."""

    def _batches_vary(self, readings: int) -> bool:
        """Return True if the loader, read again some times, gives other batches, in any process."""
        again = (read_batches(self.trainer, self.count, rereading=i + 1)[0] for i in range(readings))
        differ = any(not same_batches(self.batches, batches) for batches in again)
        return self.trainer.strategy.reduce_boolean_decision(differ, all=False)

    def _give_up_comparison(self) -> None:
        self._is_comparable = False
        rank_zero_warn(
            f"Grow: the validation loader gives other batches each time; seeds are measured on the first ones, and "
            f"their {self.monitor} is not compared with Lightning's"
        )

    def measure(self, variants: Sequence[SeedVariant], name: str | None = None) -> list[float]:
        """Return the metric with each combination of seeds, averaged over processes.

        `name` is that of a logged metric. None: the score, or the metric `monitor`. Of several combinations the first
        is measured once more at the end, in the state that the last one has left. Raises ValueError if the metric
        then has another value.
        """
        if self.score is not None and name is None:
            with isolate_rng(), torch.no_grad(), isolated_state(self.network):
                means = measure_variants(self.network, variants, map(self._pair, self.batches), score=self.score)
            return self.trainer.strategy.reduce(means, reduce_op="mean").tolist()
        name = name or self.monitor
        values: list[float] = []
        for variant in variants:
            with isolated_state(self.module, reset=True):
                values.append(self._value(variant, name))
                if len(values) == len(variants) > 1:
                    values.append(self._value(variants[0], name))
        if len(variants) > 1 and not self._agree(values[0], repeated := values.pop()):
            raise ValueError(
                f"Grow: {name} of one network is {values[0]:.6g} at first and {repeated:.6g} after other seeds were "
                f"measured, so validation changes something that is not reset or not in the module; mend that, or give "
                f"Grow(score=…)"
            )
        return values

    def compare(self, measured: float | None, logged: float) -> None:
        """Raise ValueError if the metric that Lightning has logged differs from the measurement on the same batches.

        `measured` is that with all seeds, just before the validation. None: no seed was judged.
        """
        self.needs_proof = False
        if measured is not None and self._may_be_unlike and 0.0 <= logged <= 1.0:
            samples = sum(next((len(x) for x in iter_tensors(kept.batch) if x.ndim), 1) for kept in self.batches)
            by_chance = CHANCE * math.sqrt(logged * (1.0 - logged) / samples)
            if abs(measured - logged) > max(by_chance, UNLIKE * logged):
                self._may_be_unlike = False
                rank_zero_warn(
                    f"Grow: {self.monitor} is {measured:.4g} on the first {len(self.batches)} validation batches, by "
                    f"which seeds are judged, and {logged:.4g} on all; shuffle data that are sorted, or raise batches"
                )
        if measured is None or not self._is_comparable or self._agree(measured, logged):
            return
        if self._batches_vary(readings=REREADINGS):
            self._give_up_comparison()
            return
        raise ValueError(
            f"Grow: {self.monitor} is {measured:.6g} as Grow measures it and {logged:.6g} as Lightning logged it, so "
            f"that seeds would be judged wrongly; reset all metrics in each validation, and keep all that it depends "
            f"on in the module (no callback, no global), or give Grow(score=…)"
        )

    def _agree(self, one: float, other: float) -> bool:
        """Return, in all processes, whether two measurements are equal up to rounding in the first one."""
        if math.isfinite(one) and math.isfinite(other):
            tolerance = ROUNDING["16" not in str(self.trainer.precision)]
            agree = math.isclose(one, other, rel_tol=tolerance, abs_tol=SMALLEST)
        else:
            agree = str(one) == str(other)
        return self.trainer.strategy.broadcast(agree)

    def _value(self, variant: SeedVariant, name: str) -> float:
        """Return a metric of a validation with these seeds, averaged over processes."""
        with active_seeds(slots_of(self.network), variant):
            logged = rerun(self.trainer, self.batches)
        if name not in logged:
            raise ValueError(
                f"Grow: the module's validation logs no {name!r} (what a callback logs cannot be measured); log it in "
                f"the module, monitor one of: {', '.join(sorted(logged)) or 'nothing'}, or give Grow(score=…)"
            )
        return mean_over_processes(self.trainer, logged[name])

    def _pair(self, kept: KeptBatch) -> tuple[Any, Any]:
        """Return inputs and targets of a batch, prepared as the trainer does before a validation step."""
        batch = self.trainer.precision_plugin.convert_input(clone_batch(kept.batch))
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        pair = tuple(self.trainer.strategy.batch_to_device(batch, dataloader_idx=0))
        if len(pair) != 2:
            raise ValueError(f"Grow: with a score, batches must be pairs of inputs and targets; got {len(pair)} parts")
        return pair[0], pair[1]

    def example_input(self, name: str) -> ExampleInput:
        """Return what the module calls the network `name` with in validation, in the dtype of its parameters."""
        examples: list[ExampleInput] = []

        def keep_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.module._current_fx_name != "validation_step":  # other hooks may call the network, too
                return
            names = inspect.signature(module.forward).parameters
            examples.append(dict(zip(names, args, strict=False)) | kwargs if kwargs else args)
            raise _NetworkCalled

        if self.score is not None:
            inputs, _ = self._pair(self.batches[0])
            examples.append(inputs if isinstance(inputs, tuple) else (inputs,))
        else:
            handle = self.network.register_forward_pre_hook(keep_arguments, with_kwargs=True)
            try:
                with (
                    isolate_rng(),
                    torch.compiler.set_stance("force_eager"),  # compiled code does not call a hook that comes later
                    isolated_state(self.module),
                    suppress(_NetworkCalled),
                ):
                    rerun(self.trainer, self.batches[:1])
            finally:
                handle.remove()
        if not examples:
            raise ValueError(
                f"Grow: validation_step does not call {name!r}; name the network that it calls, as self.{name}(x)"
            )
        if batch_size(examples[0]) < 2:
            raise ValueError("Grow: the first validation batch has one sample; give the loader a batch_size of 2")
        dtype = next(self.network.parameters()).dtype
        return map_tensors(examples[0], lambda x: x.to(dtype) if x.is_floating_point() else x)


class _NetworkCalled(Exception):
    """Ends a validation once the network is called."""


def first_rows(example: ExampleInput, rows: int) -> ExampleInput:
    """Return an example with the first `rows` rows of every tensor that has as many rows as the first one."""
    length = len(next(iter_tensors(example)))
    return map_tensors(example, lambda x: x[:rows] if x.ndim and len(x) == length else x)


# Batches.


def check_validation(trainer: Trainer, module: LightningModule, *, by_validation_step: bool) -> None:
    """Raise ValueError if batches cannot be read, or, `by_validation_step`, if that method takes no batches."""
    combined = _loaders(trainer)
    loaders = combined.flattened
    if combined._mode == "sequential" and len(loaders) > 1:
        raise ValueError(f"Grow: it measures on one validation loader, there are {len(loaders)}; give one")
    if any(isinstance(loader, Iterator) for loader in loaders):
        raise ValueError(
            "Grow: the validation loader is an iterator, which can be read once only; give a DataLoader, or another "
            "iterable that begins anew (Grow(score=…) needs its batches, too)"
        )
    if by_validation_step and is_param_in_hook_signature(module.validation_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "Grow: validation_step takes a dataloader_iter, and is measured on batches; let it take a batch, or give "
            "Grow(score=…)"
        )


def _loaders(trainer: Trainer) -> CombinedLoader:
    loaders = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    assert loaders is not None, "they are set up"
    return loaders


def read_batches(trainer: Trainer, count: int, *, rereading: int = 0) -> tuple[list[KeptBatch], bool]:
    """Return the first `count` validation batches as Lightning reads them, and whether there are no more.

    `rereading` is the number of a further reading, in which a loader that draws random numbers draws other ones; 0: the
    reading that Lightning would do now.
    """
    source = _loaders(trainer)
    loader = CombinedLoader(source.iterables, source._mode)  # a validation that is under way reads from `source`
    loader.limits = trainer.fit_loop.epoch_loop.val_loop._max_batches
    generators = [value for value in reachable(source.flattened) if isinstance(value, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    with isolate_rng():
        if rereading:
            torch.manual_seed(rereading)
            np.random.seed(rereading)
            random.seed(rereading)
            for generator in generators:
                generator.manual_seed(rereading)
        for part in loader.flattened:
            _set_sampler_epoch(part, trainer.current_epoch + rereading)
        fetcher = _PrefetchDataFetcher()
        fetcher.setup(loader)
        batches = [KeptBatch(*kept) for kept in islice(iter(fetcher), count)]
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    if not batches:
        raise ValueError(
            "Grow: the validation loader gives no batch, or none when it is read again; give one that begins anew "
            "(Grow(score=…) needs its batches, too)"
        )
    return batches, fetcher.done


def same_batches(one: Any, other: Any) -> bool:
    """Return True if two nested values have equal tensors, where NaN equals NaN, and equal other values."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and bool(((one == other) | (one != one)).all())
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_batches(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_batches, one, other))
    return same_batches(vars(one), vars(other)) if hasattr(one, "__dict__") else bool(one == other)


def clone_batch(batch: Any) -> Any:
    """Return a copy that a validation step may change. Raises ValueError if there is none."""
    try:
        return copy.deepcopy(batch)
    except COPY_ERRORS as error:
        raise ValueError(f"Grow: a validation batch cannot be copied: {_line(error)}; give Grow(score=…)") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


# State.


def reachable(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield all objects that a deep copy of the roots would reach; not what tensors and other SHARED objects hold."""
    seen: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if isinstance(value, ATOMIC) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        if isinstance(value, Tensor) or (isinstance(value, SHARED) and value not in roots):
            continue
        if isinstance(value, dict):  # quicker to ask than a Mapping
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset | deque):
            waiting += value
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        waiting += getattr(value, "__dict__", {}).values()


@contextmanager
def kept_attributes(*objects: Any) -> Iterator[None]:
    """Afterwards restore the attributes of objects, remove new ones, and restore the state of random generators."""
    kept = [dict(vars(owner)) for owner in objects]
    restore: list[Callable[[], object]] = []
    for value in (value for attributes in kept for value in attributes.values()):
        if isinstance(value, random.Random):
            restore.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            restore.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, torch.Generator):
            restore.append(partial(value.set_state, value.get_state()))
    try:
        yield
    finally:
        for restore_generator in restore:
            restore_generator()
        for owner, attributes in zip(objects, kept, strict=True):
            vars(owner).clear()
            vars(owner).update(attributes)


@contextmanager
def kept_schedules(trainer: Trainer) -> Iterator[None]:
    """Afterwards restore options of optimizers, such as learning rates, and attributes of schedulers and inner ones."""
    schedulers = schedulers_in(*(config.scheduler for config in trainer.lr_scheduler_configs))
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    options = [(group, {name: value for name, value in group.items() if name != "params"}) for group in groups]
    tensors = [(value, value.clone()) for _, kept in options for value in kept.values() if isinstance(value, Tensor)]
    with kept_attributes(*schedulers):
        try:
            yield
        finally:
            for value, kept_value in tensors:
                value.copy_(kept_value)
            for group, kept in options:
                group.update(kept)


@contextmanager
def kept_weights(module: nn.Module) -> Iterator[None]:
    """Afterwards restore the parameters of a module that learn: a validation may exchange them with their averages."""
    learning = (parameter for parameter in module.parameters() if parameter.requires_grad and not is_lazy(parameter))
    kept = [(parameter, parameter.data, parameter.detach().clone()) for parameter in learning]
    try:
        yield
    finally:
        for parameter, data, value in kept:
            parameter.data = data.copy_(value)  # not in place for autograd, which may hold a graph of the training


def _is_copyable(value: Any) -> bool:
    try:
        copy.copy(value)
    except COPY_ERRORS:
        return False
    return True


@contextmanager
def isolated_state(module: nn.Module, *, reset: bool = False) -> Iterator[None]:
    """Let a module and its parts work on a deep copy of their attributes within this context.

    Parts stay the same objects, as others may refer to them. Parameters that learn, and SHARED objects, are not copied.
    With `reset` torchmetrics begin without what they have counted.
    """
    parts = list(module.modules())
    shared: dict[int, Any] = {id(part): part for part in parts}  # a memo for deepcopy: what is not copied, by id
    metrics: list[Any] = []
    values = list(reachable(parts))
    for value in values:
        if isinstance(value, Metric | MetricCollection):
            metrics.append(value)
        if isinstance(value, SHARED) or (
            isinstance(value, nn.Parameter) and (value.requires_grad or value.numel() > LARGEST_COPIED)
        ):
            shared[id(value)] = value
        elif isinstance(value, Tensor) and not value.is_leaf:
            shared[id(value)] = value.detach().clone()
    states = [vars(part) for part in parts]
    try:
        copies = copy.deepcopy(states, memo := dict(shared))
    except COPY_ERRORS:
        shared |= {id(value): value for value in values if not _is_copyable(value)}  # such as a lock or an open file
        try:
            copies = copy.deepcopy(states, memo := dict(shared))
        except COPY_ERRORS as error:
            raise ValueError(
                f"Grow: {type(module).__name__} is measured on a copy of its attributes, and one cannot be copied: "
                f"{_line(error)}; keep it out of the module, or give Grow(score=…)"
            ) from error
    with kept_attributes(*parts):
        for part, attributes in zip(parts, copies, strict=True):
            vars(part).clear()
            vars(part).update(attributes)
        if reset:
            for metric in sorted(metrics, key=lambda metric: isinstance(metric, MetricCollection)):
                memo.get(id(metric), metric).reset()  # collections come last: theirs share states
        yield


# The run.


class _StandIn:
    """Object in the place of another one, whose class it seems to have."""

    def __init__(self, other: Any) -> None:
        self._other = other

    @property
    def __class__(self) -> Any:
        return type(self._other)


class _Unhooked(_StandIn):
    """Stand-in for a callback, without the hooks that Lightning calls in a validation."""

    def __getattr__(self, name: str) -> Any:
        return None if name.startswith("on_validation") else getattr(self._other, name)


class _Silent(_StandIn):
    """Stand-in for a logger, which has its attributes and writes nothing."""

    experiment = DummyExperiment()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._other, name)
        return self.experiment.nop if callable(value) else value


class _Batches(Iterator[KeptBatch]):
    """Iterator over copies of batches in memory, in place of Lightning's; `done` once it has given the last one."""

    done = False

    def __init__(self, batches: Sequence[KeptBatch]) -> None:
        self.left = deque(batches)

    def __next__(self) -> KeptBatch:
        if not self.left:
            raise StopIteration
        kept = self.left.popleft()
        self.done = not self.left
        return kept._replace(batch=clone_batch(kept.batch))


def rerun(trainer: Trainer, batches: Sequence[KeptBatch]) -> dict[str, Tensor]:
    """Validate the module on batches, and return the logged metrics. Its state changes: see `isolated_state`."""
    epoch_loop, wrapper = trainer.fit_loop.epoch_loop, trainer.strategy.model
    # DistributedDataParallel remembers in each pass whether buffers are to be shared in the next one.
    outside = [] if wrapper is trainer.lightning_module else [wrapper]
    outside += [] if trainer.datamodule is None else [trainer.datamodule]  # type: ignore[attr-defined]
    with (
        isolate_rng(),
        kept_schedules(trainer),
        kept_attributes(trainer, epoch_loop, *outside),
        kept_weights(trainer.lightning_module),
    ):
        trainer.state = replace(trainer.state, stage=RunningStage.VALIDATING)
        trainer.callbacks = [_Unhooked(callback) for callback in trainer.callbacks]
        trainer.loggers = [_Silent(logger) for logger in trainer.loggers]
        trainer.profiler = PassThroughProfiler()
        epoch_loop.val_loop = _loop_over(trainer, batches)
        # Logged metrics go to copies, and those that the run has set are returned.
        connector = trainer._logger_connector = copy.copy(trainer._logger_connector)
        connector._first_loop_iter = connector._current_fx = None
        earlier = dict(connector._callback_metrics)
        connector._callback_metrics = dict(earlier)
        connector._logged_metrics = dict(connector._logged_metrics)
        connector._progress_bar_metrics = dict(connector._progress_bar_metrics)
        epoch_loop.val_loop.run()
        return {name: value for name, value in connector._callback_metrics.items() if value is not earlier.get(name)}


def _loop_over(trainer: Trainer, batches: Sequence[KeptBatch]) -> Any:
    """Return a validation loop like the trainer's, which goes over batches in memory."""
    original = trainer.fit_loop.epoch_loop.val_loop
    # No inference mode: what lives longer than the run, such as a cached table, may be used in training.
    loop = type(original)(trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False)
    loop._combined_loader, loop._max_batches = original._combined_loader, original._max_batches
    vars(loop)["setup_data"] = lambda: None
    vars(loop)["reset"] = lambda: setattr(loop, "_data_fetcher", _Batches(batches))
    return loop


def mean_over_processes(trainer: Trainer, value: Tensor) -> float:
    """Return a logged metric, averaged over processes."""
    value = value.detach().to(trainer.strategy.root_device, torch.float32)
    return float(trainer.strategy.reduce(value, reduce_op="mean"))
