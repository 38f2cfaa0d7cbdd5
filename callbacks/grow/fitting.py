"""Parts of a fit that have to know of seeds: its length, the clipping of gradients, and several processes."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from esper_lightning.growth.schedules import host_groups, seed_groups


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
        per_epoch = 1 if math.isinf(interval) else batches // interval
        return epochs // trainer.check_val_every_n_epoch * per_epoch

    validations = validations_in(epochs) - validations_in(epochs_over)
    if not math.isfinite(validations) or validations < every:
        raise ValueError(
            f"Grow: {epochs - epochs_over} epochs have {validations:g} validations, and a tick takes {every}; train "
            f"for longer, or give Grow(horizon=…)"
        )
    return int(validations) // every


@contextmanager
def default_dtype_of(network: nn.Module) -> Iterator[None]:
    """Within this context new tensors have the dtype of the network's parameters, as in a step under `bf16-true`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(next(network.parameters()).dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def may_be_last_step(trainer: Trainer) -> bool:
    """Return True if a validation may come before the next optimizer step.

    A step is expected after every `accumulate_grad_batches` batches, and after the last batch of an epoch.
    """
    interval = trainer.val_check_batch
    if trainer.is_last_batch or interval is None:  # None: validations are due by the clock
        return True
    if math.isinf(interval):
        return False
    loop = trainer.fit_loop.epoch_loop
    batches = 1 + (loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx)
    return -batches % interval < trainer.accumulate_grad_batches


def may_skip_steps(trainer: Trainer) -> bool:
    """Return True if a training batch may end without an optimizer step, so that the last one before a validation may.

    It may with a loss scale, under manual optimization, and if gradients are accumulated.
    """
    precision = trainer.precision_plugin
    has_loss_scale = isinstance(precision, MixedPrecision) and precision.scaler is not None
    is_manual = not trainer.lightning_module.automatic_optimization
    return has_loss_scale or is_manual or trainer.accumulate_grad_batches > 1


def separate_clipping(clip: Callable[..., None], trainer: Trainer) -> Callable[..., None]:
    """Return a `clip_gradients` that clips the host, then each seed: one common norm would let a seed slow the host."""

    def clip_gradients(optimizer: Any, gradient_clip_val: float | None = None, *args: Any, **kwargs: Any) -> None:
        raw = getattr(optimizer, "optimizer", optimizer)  # a LightningOptimizer in manual optimization
        if not (gradient_clip_val or trainer.gradient_clip_val):  # Lightning calls this after every step
            clip(raw, gradient_clip_val, *args, **kwargs)
            return
        groups = list(raw.param_groups)
        try:
            for part in (host_groups(raw), *([seed] for seed in seed_groups(raw))):
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
    parameters = [parameter for seed in seeds for parameter in seed.parameters() if parameter.requires_grad]
    if parameters:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        mean = trainer.strategy.reduce(torch.cat([gradient.flatten() for gradient in gradients]), reduce_op="mean")
        for parameter, part in zip(parameters, mean.split([g.numel() for g in gradients]), strict=True):
            parameter.grad = part.view_as(parameter).clone()


def share_buffers(seeds: Iterable[nn.Module]) -> None:
    """Give the buffers of seeds, such as running statistics, the values of the first process."""
    for seed in seeds:
        for buffer in seed.buffers():
            torch.distributed.broadcast(buffer, src=0)
