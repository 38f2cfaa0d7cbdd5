"""Deciders of the callback `Grow`, and measurements for them: the user's metric with combinations of seeds.

Combinations are measured by the validation_step of the user's own LightningModule. The step runs on a copy of the
module with its own state, whose `log` is listened to, and with random numbers that are restored afterwards. The run's
own metrics, logs and random numbers stay as they are.
"""

import copy
import inspect
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from esper_lightning.controllers import check_methods
from esper_lightning.envs.measurements import POINTS_PER_UNIT, LossAndScore, Validation
from esper_lightning.envs.single_pool import SinglePool
from esper_lightning.envs.spaces.actions import Action
from esper_lightning.evaluation.checkpoints import find_controller
from esper_lightning.growth.counterfactual import ScoreFunction, SeedVariant, measure_variants
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.nested import ExampleInput, batch_size, evaluation_mode, iter_tensors, map_tensors
from esper_lightning.growth.slot import SeedSlot

TINY = 1e-6
"""Least share of which a logarithm is taken, and least loss by which a difference is divided."""


class Measured(NamedTuple):
    """Measurements of a validation, kept until the next training batch begins."""

    metric: float
    loss: float | None
    contributions: dict[str, float]


class Scale(NamedTuple):
    """Name of the monitored metric, and its conversion to what deciders see: points of a seed, and a score."""

    monitor: str
    mode: Literal["max", "min"]

    @property
    def unit(self) -> str:
        """Unit of contributions."""
        return "points" if self.mode == "max" else "% of the loss"

    def points(self, better: float, worse: float) -> float:
        """Return how much better the first metric is than the second, negative if it is worse.

        Mode "max": the difference · 100. Mode "min": the difference as a share of the second's size, in percent.
        A metric that is not finite is worse than any other by 100.
        """
        if not (math.isfinite(better) and math.isfinite(worse)):
            return POINTS_PER_UNIT * (math.isfinite(better) - math.isfinite(worse))
        if self.mode == "max":
            return POINTS_PER_UNIT * (better - worse)
        return POINTS_PER_UNIT * (worse - better) / max(abs(worse), TINY)

    def score(self, metric: float) -> float:
        """Return the metric as a number from 0 to 1 that grows with quality; 0 for one that is not finite.

        Raises ValueError if a metric of mode `max` is no share.
        """
        if not math.isfinite(metric):
            return 0.0
        if self.mode == "min":
            return math.exp(-max(metric, 0.0))
        if not 0.0 <= metric <= 1.00001:  # sums of shares are rounded
            raise ValueError(
                f"Grow: {self.monitor} is {metric:.4g}, but in mode 'max' it must be a share from 0 to 1; scale it, or "
                f"monitor a loss with mode 'min'"
            )
        return min(metric, 1.0)

    def validation(self, measured: Measured, slots: Sequence[str]) -> Validation:
        """Return a validation in the form in which deciders see it."""
        score, loss = self.score(measured.metric), measured.loss
        if loss is None:
            loss = measured.metric if self.mode == "min" else -math.log(max(score, TINY))

        def moved(points: float) -> LossAndScore:
            return LossAndScore(loss, score + points / POINTS_PER_UNIT)

        without = [moved(-measured.contributions.get(name, 0.0)) for name in slots]
        return Validation(all_seeds=moved(0.0), without=without, fossilized=moved(0.0))


class Decider(Protocol):
    """Chooses what grows, once per tick. If it has `state_dict` and `load_state_dict(pool, state)`, runs can resume."""

    def reset(self, pool: SinglePool) -> None:
        """Begin a training."""

    def act(self, pool: SinglePool) -> Action:
        """Return an action that is possible according to `pool.masks`."""
        ...


def make_decider(decider: str | Decider) -> Decider:
    """Return the decider of a name or a file; an object is returned as it is."""
    if isinstance(decider, str):
        return find_controller(decider, "Grow")
    check_methods(decider, "Grow: decider")
    return decider


def resume_decider(decider: Any, name: str, pool: SinglePool, *, saved: dict[str, Any]) -> None:
    """Let a decider continue from its name and state in a checkpoint. Raises ValueError if it cannot."""
    if saved["name"] != name:
        raise ValueError(
            f"Grow: the checkpoint is of decider: {saved['name']}, the run of decider: {name}; give the same"
        )
    if saved["state"] is None:
        raise ValueError(f"Grow: {name} cannot continue a run; give it state_dict and load_state_dict(pool, state)")
    decider.load_state_dict(pool, saved["state"])


@contextmanager
def active_seeds(slots: Mapping[str, SeedSlot], variant: SeedVariant) -> Iterator[None]:
    """Within this context the seeds named by `variant` are active, and all others switched off."""
    for name, slot in slots.items():
        if slot.occupied:
            slot.override = SeedSlot.blend_output if name in variant else (lambda slot, x: x)
    try:
        yield
    finally:
        for slot in slots.values():
            slot.override = None


class VariantMeter:
    """Measures a network, whose seeds are switched, on the first `count` validation batches, kept in memory."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        network: nn.Module,
        *,
        monitor: str,
        score: ScoreFunction | None,
        count: int,
    ) -> None:
        self.trainer, self.module, self.network = trainer, module, network
        self.monitor, self.score = monitor, score
        if trainer.val_dataloaders is None:  # they are loaded before the first validation, which may be far away
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
            trainer.training = True
        loaders: Any = trainer.val_dataloaders
        if isinstance(loaders, Mapping | list | tuple):
            loaders = list(loaders.values()) if isinstance(loaders, Mapping) else list(loaders)
            if len(loaders) > 1:
                raise ValueError(f"Grow: it measures on one validation loader, there are {len(loaders)}; give one")
            (loaders,) = loaders
        limit = min(count, *trainer.num_val_batches)
        with isolate_rng():
            self.batches = list(islice(loaders, int(limit)))

    @torch.no_grad()
    def measure(self, variants: Sequence[SeedVariant], name: str | None = None) -> list[float]:
        """Return the metric (or the one called `name`) with each combination of seeds, averaged over processes."""
        step_context = self.trainer.precision_plugin.val_step_context
        if self.score is not None and name is None:
            with isolate_rng(), step_context():
                pairs = (tuple(self._to_device(batch)) for batch in self.batches)
                means = measure_variants(self.network, variants, pairs, score=self.score)
            return self.trainer.strategy.reduce(means, reduce_op="mean").tolist()
        listeners, slots = [_Listener(self.module) for _ in variants], slots_of(self.network)
        with evaluation_mode(self.module):
            for listener in listeners:
                with isolate_rng():
                    listener.module.on_validation_epoch_start()
            for number, batch in enumerate(map(self._to_device, self.batches)):
                for variant, listener in zip(variants, listeners, strict=True):
                    with isolate_rng(), active_seeds(slots, variant), step_context():
                        listener.run(batch, number)
            return [listener.result(name or self.monitor, self.trainer) for listener in listeners]

    def _to_device(self, batch: Any) -> Any:
        """Prepare a batch as the trainer does before a validation step."""
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    @torch.no_grad()
    def example_input(self, name: str) -> ExampleInput:
        """Return what the module calls the network `name` with in a validation step, in the dtype of its parameters."""
        seen: list[ExampleInput] = []

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names = inspect.signature(module.forward).parameters
            seen.append(dict(zip(names, args, strict=False)) | kwargs if kwargs else args)

        handle = self.network.register_forward_pre_hook(see, with_kwargs=True)
        try:
            with (
                evaluation_mode(self.module),
                isolate_rng(),
                self.trainer.precision_plugin.val_step_context(),
                torch.compiler.set_stance("force_eager"),  # compiled code does not call a hook that comes later
            ):
                _Listener(self.module).run(self._to_device(self.batches[0]), 0)
        finally:
            handle.remove()
        if not seen:
            raise ValueError(
                f"Grow: validation_step does not call {name!r}; name the network that it calls, as self.{name}(x)"
            )
        if batch_size(seen[0]) < 2:
            raise ValueError("Grow: the first validation batch has one sample; give the loader a batch_size of 2")
        dtype = next(self.network.parameters()).dtype
        return map_tensors(seen[0], lambda x: x.to(dtype) if x.is_floating_point() else x)


def first_rows(example: ExampleInput, rows: int) -> ExampleInput:
    """Return an example with the first `rows` rows of every tensor that has as many rows as the first one."""
    length = len(next(iter_tensors(example)))
    return map_tensors(example, lambda x: x[:rows] if x.ndim and len(x) == length else x)


class _Listener:
    """A copy of a LightningModule that shares its networks, with a `log` that keeps what it is told."""

    def __init__(self, module: LightningModule) -> None:
        self.module = isolated_copy(module)
        vars(self.module)["log"] = self._log
        self.means: dict[str, list[tuple[float, float]]] = {}  # logged numbers, and their weights
        self.metrics: dict[str, Metric] = {}
        self._batch: Any = None

    def run(self, batch: Any, number: int) -> None:
        """Run the module's validation step on a batch."""
        self._batch = batch
        step = self.module.validation_step
        # As Lightning does: a step may take the batch alone.
        arguments = (number,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()
        step(batch, *arguments)

    def _log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        if isinstance(value, Metric):
            self.metrics[name] = value
            return
        weight = 1 if self._batch is None else batch_size or extract_batch_size(self._batch)
        self.means.setdefault(name, []).append((float(torch.as_tensor(value).float().mean()), float(weight)))

    def result(self, monitor: str, trainer: Trainer) -> float:
        """Return a metric over all batches and processes. Raises ValueError if it was not logged."""
        if monitor not in self.means and monitor not in self.metrics:
            self._batch = None
            with isolate_rng():
                self.module.on_validation_epoch_end()
        if monitor in self.metrics:
            return float(self.metrics[monitor].compute())
        if monitor not in self.means:
            logged = ", ".join(sorted([*self.means, *self.metrics])) or "nothing"
            raise ValueError(f"Grow: validation logs no {monitor!r}; log it, or monitor one of: {logged}")
        pairs = torch.tensor(self.means[monitor], device=trainer.strategy.root_device)
        sums = torch.stack([(pairs[:, 0] * pairs[:, 1]).sum(), pairs[:, 1].sum()])
        total, weight = trainer.strategy.reduce(sums, reduce_op="sum").tolist()
        return total / weight


def isolated_copy(module: LightningModule) -> LightningModule:
    """Return a copy of a module that has its own state and shares its networks.

    Its own are containers at any depth, with the tensors and arrays in them, its buffers, and torchmetrics, which begin
    without what they have counted. Networks, parameters and objects of other classes are shared.
    """
    copied = object.__new__(type(module))
    copies: dict[int, Any] = {id(module): copied}
    vars(copied).update({name: _own(value, copies) for name, value in vars(module).items()})
    return copied


def _own(value: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of a value if it is state, else the value; `copies` holds what is copied already, by id."""
    if id(value) in copies:
        return copies[id(value)]
    own = value
    if isinstance(value, nn.Module):
        metrics = [part for part in value.modules() if isinstance(part, Metric)]
        if metrics and not any(True for _ in value.parameters()):
            own = copy.deepcopy(value, copies)
            for part in own.modules():
                if isinstance(part, Metric):
                    part.reset()
    elif isinstance(value, Tensor):
        own = value if isinstance(value, nn.Parameter) else value.clone()
    elif isinstance(value, np.ndarray | set):
        own = value.copy()
    elif isinstance(value, dict):
        own = copies[id(value)] = copy.copy(value)
        for key, element in value.items():
            own[key] = _own(element, copies)
    elif isinstance(value, list | deque):
        own = copies[id(value)] = copy.copy(value)
        own.clear()
        own.extend(_own(element, copies) for element in value)
    elif type(value) is tuple:
        own = tuple(_own(element, copies) for element in value)
    copies[id(value)] = own
    return own
