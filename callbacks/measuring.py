"""Deciders of the callback `Grow`, and measurements for them: the user's metric with combinations of seeds.

Combinations are measured by Lightning's own validation of the user's module, on batches that are kept in memory and
without a trace: see `rerun`. A measurement proves itself, or is refused.
"""

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Protocol

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from esper_lightning.callbacks.measuring import (
    check_validation,
    clone_batch,
    isolated_state,
    mean_over_processes,
    read_batches,
    rerun,
    same_batches,
)
from esper_lightning.controllers import check_methods
from esper_lightning.envs.actions import Action
from esper_lightning.envs.host_pool import SinglePool
from esper_lightning.envs.measurements import POINTS_PER_UNIT, LossAndScore, Validation
from esper_lightning.evaluation.checkpoints import find_controller
from esper_lightning.growth.counterfactual import ScoreFunction, SeedVariant, active_seeds, measure_variants
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.runtime.nested import ExampleInput, batch_size, iter_tensors, map_tensors

LARGEST_SHARE = 1.00001
"""Largest metric that is taken for a share: sums of shares are rounded."""

TINY = 1e-6
"""Least share of which a logarithm is taken, and least loss by which a difference is divided."""

ROUNDING = {True: 1e-4, False: 2e-3}
"""Largest relative difference of two measurements of the same network, by whether the precision is 32 bits or more."""

REREADINGS = 3
"""Further readings of the validation loader before a measurement that Lightning contradicts is refused."""


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
        if not 0.0 <= metric <= LARGEST_SHARE:
            raise ValueError(
                f"Grow: {self.monitor} is {metric:.4g}, but in mode 'max' it must be a share from 0 to 1; scale it, or "
                f"monitor a loss with mode 'min'"
            )
        return min(metric, 1.0)

    def validation(self, metric: float, loss: float | None) -> Validation:
        """Return a validation in the form in which deciders see it; without a loss that of the metric."""
        score = self.score(metric)
        if loss is None:
            loss = metric if self.mode == "min" else -math.log(max(score, TINY))
        whole = LossAndScore(loss, score)
        return Validation(all_seeds=whole, without=[], fossilized=whole)


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


class VariantMeter:
    """Measures a network, whose seeds are switched, on the first `count` validation batches, kept in memory.

    Attributes:
        needs_proof: True until Lightning has logged what was measured, if it validates on the same batches.
    """

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
        self.monitor, self.score, self.count = monitor, score, count
        self._whole: float | None = None  # the metric of all seeds, until it is compared
        if trainer.val_dataloaders is None:  # they are loaded before the first validation, which may be far away
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
            trainer.training = True
        check_validation(trainer, module, by_steps=score is None)
        self.batches, are_all = read_batches(trainer, count)
        self._is_comparable = score is None and trainer.strategy.reduce_boolean_decision(are_all)
        if self._is_comparable and self._vary(1):
            self._exempt()
        self.needs_proof = self._is_comparable

    def _vary(self, readings: int) -> bool:
        """Return True if the loader gives other batches when it is read again, in any process."""
        again = (read_batches(self.trainer, self.count, other=i + 1)[0] for i in range(readings))
        differ = any(not same_batches(self.batches, batches) for batches in again)
        return self.trainer.strategy.reduce_boolean_decision(differ, all=False)

    def _exempt(self) -> None:
        self._is_comparable = False
        rank_zero_warn(
            f"Grow: the validation loader gives other batches each time; seeds are measured on the first ones, and "
            f"their {self.monitor} is not compared with Lightning's"
        )

    def measure(self, variants: Sequence[SeedVariant], name: str | None = None) -> list[float]:
        """Return the metric (or the one called `name`) with each combination of seeds, averaged over processes.

        If there are several, the first is measured once more at the end, in the state that the last one has left.
        Raises ValueError if it then has another value.
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
        if len(variants) > 1 and not self._agree(values[0], last := values.pop()):
            raise ValueError(
                f"Grow: {name} of one network is {values[0]:.6g} at first and {last:.6g} after other seeds were "
                f"measured, so validation changes something that is not reset or not in the module; mend that, or give "
                f"Grow(score=…)"
            )
        if name == self.monitor:
            self._whole = values[0]
        return values

    def compare(self, logged: float) -> None:
        """Compare a metric that Lightning has logged with that of the last measurement, if it was of the same batches.

        Raises ValueError if they differ.
        """
        whole, self._whole, self.needs_proof = self._whole, None, False
        if whole is None or not self._is_comparable or self._agree(whole, logged):
            return
        if self._vary(REREADINGS):
            self._exempt()
            return
        raise ValueError(
            f"Grow: {self.monitor} is {whole:.6g} as Grow measures it and {logged:.6g} as Lightning logged it, so that "
            f"seeds would be judged wrongly; reset all metrics in each validation, and keep all that it depends on in "
            f"the module (no callback, no global), or give Grow(score=…)"
        )

    def _agree(self, one: float, other: float) -> bool:
        """Return True if two measurements are equal up to rounding, in the first process."""
        if math.isfinite(one) and math.isfinite(other):
            tolerance = ROUNDING["16" not in str(self.trainer.precision)]
            agree = math.isclose(one, other, rel_tol=tolerance, abs_tol=TINY * TINY)
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

    def _pair(self, item: tuple[Any, int, int]) -> tuple[Any, Any]:
        """Return inputs and targets of a batch, prepared as the trainer does before a validation step."""
        batch = self.trainer.precision_plugin.convert_input(clone_batch(item[0]))
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        pair = tuple(self.trainer.strategy.batch_to_device(batch, dataloader_idx=0))
        if len(pair) != 2:
            raise ValueError(f"Grow: with a score, batches must be pairs of inputs and targets; got {len(pair)} parts")
        return pair[0], pair[1]

    def example_input(self, name: str) -> ExampleInput:
        """Return what the module calls the network `name` with in validation, in the dtype of its parameters."""
        seen: list[ExampleInput] = []

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.module._current_fx_name != "validation_step":
                return
            names = inspect.signature(module.forward).parameters
            seen.append(dict(zip(names, args, strict=False)) | kwargs if kwargs else args)
            raise _Seen

        if self.score is not None:
            inputs = self._pair(self.batches[0])[0]
            seen.append(inputs if isinstance(inputs, tuple) else (inputs,))
        else:
            handle = self.network.register_forward_pre_hook(see, with_kwargs=True)
            try:
                with (
                    isolate_rng(),
                    torch.compiler.set_stance("force_eager"),  # compiled code does not call a hook that comes later
                    isolated_state(self.module),
                    suppress(_Seen),
                ):
                    rerun(self.trainer, self.batches[:1])
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


class _Seen(Exception):
    """Ends a validation once the network is called."""


def first_rows(example: ExampleInput, rows: int) -> ExampleInput:
    """Return an example with the first `rows` rows of every tensor that has as many rows as the first one."""
    length = len(next(iter_tensors(example)))
    return map_tensors(example, lambda x: x[:rows] if x.ndim and len(x) == length else x)
