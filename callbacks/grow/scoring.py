"""The metric of a network with combinations of its seeds, by the validation_step of its own LightningModule.

The step runs on a copy of the module with its own state, whose `log` is listened to, and with random numbers that are
restored afterwards. The run's own metrics, logs and random numbers stay as they are.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from esper_lightning.callbacks.grow.module_copy import isolated_copy
from esper_lightning.growth.counterfactual import ScoreFunction, SeedVariant, measure_variants
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.nested import ExampleInput, evaluation_mode, iter_tensors, map_tensors
from esper_lightning.growth.slot import SeedSlot


class Meter(NamedTuple):
    """Measured quantity: a metric that the module logs, or a score of each sample."""

    monitor: str
    score: ScoreFunction | None


def load_batches(trainer: Trainer, count: int) -> list[Any]:
    """Return the first `count` validation batches, or all if there are fewer.

    Raises ValueError if there are several loaders.
    """
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
        return list(islice(loaders, int(limit)))


@contextmanager
def active_seeds(slots: Mapping[str, SeedSlot], variant: SeedVariant) -> Iterator[None]:
    """Within this context the seeds named by `variant` are active, and all others switched off."""
    for name, slot in slots.items():
        if slot.occupied:
            slot.override = SeedSlot.active_output if name in variant else _without_seed
    try:
        yield
    finally:
        for slot in slots.values():
            slot.override = None


def _without_seed(slot: SeedSlot, x: Tensor) -> Tensor:
    return x


class VariantMeter:
    """Measures a network on batches that are kept in memory.

    Args:
        trainer: Trainer in a fit.
        module: LightningModule that holds `network`.
        network: Network whose seeds are switched.
        meter: What is measured.
        batches: Validation batches as the loader gives them.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, network: nn.Module, *, meter: Meter, batches: list[Any]
    ) -> None:
        self.trainer = trainer
        self.module = module
        self.network = network
        self.meter = meter
        self.batches = batches

    @torch.no_grad()
    def measure(self, variants: Sequence[SeedVariant]) -> list[float]:
        """Return the metric with each combination of seeds on the same batches, averaged over processes."""
        if self.meter.score is not None:
            return self._measure_scores(variants, self.meter.score)
        return self.measure_logged(variants, self.meter.monitor)

    @torch.no_grad()
    def measure_logged(self, variants: Sequence[SeedVariant], name: str) -> list[float]:
        """Return a logged metric with each combination of seeds; see `measure`."""
        listeners = [_Listener(self.module) for _ in variants]
        slots = slots_of(self.network)
        with evaluation_mode(self.module):
            for listener in listeners:
                with isolate_rng():
                    listener.module.on_validation_epoch_start()
            for number, batch in enumerate(map(self._to_device, self.batches)):
                for variant, listener in zip(variants, listeners, strict=True):
                    with isolate_rng(), active_seeds(slots, variant), self.trainer.precision_plugin.val_step_context():
                        listener.run(batch, number)
            return [listener.result(name, self.trainer) for listener in listeners]

    def _measure_scores(self, variants: Sequence[SeedVariant], score: ScoreFunction) -> list[float]:
        with isolate_rng(), self.trainer.precision_plugin.val_step_context():
            means = measure_variants(self.network, variants, map(self._pair, self.batches), score=score)
        return self.trainer.strategy.reduce(means, reduce_op="mean").tolist()

    def _pair(self, batch: Any) -> Any:
        on_device = self._to_device(batch)
        if not isinstance(on_device, list | tuple) or len(on_device) != 2:
            raise ValueError(
                f"Grow: score wants batches (inputs, targets), got {type(on_device).__name__}; leave score out, and "
                f"monitor a metric"
            )
        return tuple(on_device)

    def _to_device(self, batch: Any) -> Any:
        """Prepare a batch as the trainer does before a validation step."""
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    @torch.no_grad()
    def example_input(self, name: str) -> ExampleInput:
        """Return what the module calls the network with in a validation step, at least float32 or as its parameters.

        Raises ValueError, naming the network `name`, if the step does not call it.
        """
        seen: list[ExampleInput] = []

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(_join_arguments(module.forward, args, kwargs) if kwargs else args)

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
        dtype = next(self.network.parameters()).dtype
        return map_tensors(seen[0], lambda x: x.to(dtype) if x.is_floating_point() else x)


def _join_arguments(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    names = list(inspect.signature(forward).parameters)
    return dict(zip(names, args, strict=False)) | kwargs


def first_rows(example: ExampleInput, rows: int) -> ExampleInput:
    """Return an example with the first `rows` rows of every tensor that has as many rows as the first one."""
    length = len(next(iter_tensors(example)))
    return map_tensors(example, lambda x: x[:rows] if x.ndim and len(x) == length else x)


class _Listener:
    """A copy of a LightningModule that shares its networks, with a `log` that keeps what it is told."""

    def __init__(self, module: LightningModule) -> None:
        self.module = isolated_copy(module)
        vars(self.module)["log"] = self._log
        self.means: dict[str, list[tuple[float, float]]] = {}
        """Sums and weights of logged numbers."""
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
