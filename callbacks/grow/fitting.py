"""Parts of a fit that have to know of seeds: its length, the clipping of gradients, and several processes."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from esper_lightning.growth.param_groups import host_groups, seed_groups


def count_ticks(trainer: Trainer, every: int, *, epochs_over: int) -> int:
    """Return the number of ticks of a training after its first `epochs_over` epochs.

    Raises ValueError if the trainer's settings do not tell.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return 1
    epochs, batches, interval = trainer.max_epochs, trainer.num_training_batches, trainer.val_check_batch
    if epochs is None or epochs < 1 or trainer.max_steps != -1 or interval is None:
        raise ValueError(
            "Grow: the length of the training is unknown without max_epochs, and with max_steps or validations by the "
            "clock; give Grow(horizon=…), in validations"
        )

    def validations_in(epochs: int) -> float:
        if trainer.check_val_every_n_epoch is None:
            return epochs * batches // interval
        return epochs // trainer.check_val_every_n_epoch * (1 if math.isinf(interval) else batches // interval)

    validations = validations_in(epochs) - validations_in(epochs_over)
    if not math.isfinite(validations) or validations < every:
        raise ValueError(
            f"Grow: {epochs - epochs_over} epochs have {validations:g} validations, and a tick takes {every}; train "
            f"for longer, or give Grow(horizon=…)"
        )
    return int(validations) // every


def may_be_last_step(trainer: Trainer) -> bool:
    """Return True if a validation may come before the next optimizer step.

    A step is expected after every `accumulate_grad_batches` batches, and after the last batch of an epoch.
    """
    interval, loop = trainer.val_check_batch, trainer.fit_loop.epoch_loop
    if trainer.is_last_batch or interval is None:  # None: validations are due by the clock
        return True
    batches = 1 + (loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx)
    return not math.isinf(interval) and -batches % interval < trainer.accumulate_grad_batches


def separate_clipping(clip: Callable[..., None], trainer: Trainer) -> Callable[..., None]:
    """Return a `clip_gradients` that clips the host, then each seed: one common norm would let a seed slow the host."""

    def clip_gradients(optimizer: Any, gradient_clip_val: float | None = None, *args: Any, **kwargs: Any) -> None:
        raw = getattr(optimizer, "optimizer", optimizer)  # a LightningOptimizer in manual optimization
        groups = list(raw.param_groups)
        is_clipped = gradient_clip_val or trainer.gradient_clip_val  # Lightning calls this after every step
        parts = [host_groups(raw), *([seed] for seed in seed_groups(raw))] if is_clipped else [groups]
        try:
            for part in parts:
                raw.param_groups[:] = part
                clip(raw, gradient_clip_val, *args, **kwargs)
        finally:
            raw.param_groups[:] = groups

    return clip_gradients


def wrap_without_seeds(trainer: Trainer, seeds: Iterable[nn.Module]) -> None:
    """Let DistributedDataParallel know the parameters of the host alone, as if no seed had existed when it began.

    It waits in each step for the gradients of all parameters that it knows, also for those of a seed that is culled.
    """
    strategy = trainer.strategy
    parameters = [parameter for seed in seeds for parameter in seed.parameters() if parameter.requires_grad]
    if parameters and isinstance(strategy, DDPStrategy):
        strategy.model = strategy.lightning_module  # releases the wrapper that knows them, with its hooks
        for parameter in parameters:
            parameter.requires_grad_(False)
        strategy.configure_ddp()
        for parameter in parameters:
            parameter.requires_grad_(True)


def average_gradients(trainer: Trainer, seeds: Iterable[nn.Module]) -> None:
    """Average the gradients of seeds over all processes.

    DistributedDataParallel knows the parameters of the host alone. Averages of accumulated gradients are accumulated
    averages, so this may follow every backward pass.
    """
    for parameter in (parameter for seed in seeds for parameter in seed.parameters() if parameter.requires_grad):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = trainer.strategy.reduce(gradient, reduce_op="mean")
