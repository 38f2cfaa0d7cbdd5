"""FLOPs of the training step of a user's module, counted on a copy."""

import copy
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from esper_lightning.callbacks.measuring import kept_attributes, kept_schedules
from esper_lightning.envs.flops import FlopCounter
from esper_lightning.growth.blocks import find_blocks
from esper_lightning.growth.slot import pass_on
from esper_lightning.growth.stack import deepen, sources_of
from esper_lightning.runtime.nested import copy_module, hooks_of

COUNT_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ArithmeticError)
"""Exceptions of a training step that does not run on a copy of its module."""


class BatchCost(NamedTuple):
    """Targets of a training batch, and its FLOPs, forward and backward, as a linear function of numbers of blocks."""

    fixed: float  # FLOPs outside of the blocks
    per_block: dict[str, float]  # FLOPs of one block, by the name of its list; the mean where they differ
    targets: int  # labels, or tokens to predict; 0 if torch's losses do not tell

    def flops(self, depths: Mapping[str, int]) -> int:
        """Return the FLOPs of a batch for the number of blocks in each list."""
        return round(self.fixed + sum(flops * depths[name] for name, flops in self.per_block.items()))


def measure_batch(
    trainer: Trainer, module: LightningModule, depths: Mapping[str, range], *, batch: Any, batch_idx: int
) -> BatchCost:
    """Measure what a training batch costs, without what activation checkpointing computes again.

    `depths` has for each list of blocks the numbers of blocks from the present to the largest one. The step runs on
    copies of the module and of the batch, as it is and with each list at its largest depth. Raises one of COUNT_ERRORS
    if it does not run there.
    """
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError("training_step takes batches from the loader itself")

    def count(blocks: Mapping[str, int]) -> FlopCounter:
        try:
            return _count_on_copy(trainer, module, batch, batch_idx, blocks=blocks, hooked=False)
        except COUNT_ERRORS:  # a step may need what hooks on its modules collect
            return _count_on_copy(trainer, module, batch, batch_idx, blocks=blocks, hooked=True)

    present, per_block = count({}), {}
    for name, numbers in depths.items():
        most = max(numbers.stop - 1, numbers.start + 1)
        per_block[name] = (count({name: most}).total - present.total) / (most - numbers.start)
    fixed = present.total - sum(per_block[name] * numbers.start for name, numbers in depths.items())
    return BatchCost(fixed, per_block, present.targets)


def _count_on_copy(
    trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, *, blocks: Mapping[str, int], hooked: bool
) -> FlopCounter:
    """Count a training step on a copy of the module, in which lists grow to `blocks`, numbers by name of the list.

    Without `hooked`, hooks that are not torch's or this package's do not run.
    """
    outside = [x for x in (trainer.datamodule, *trainer.callbacks, *trainer.loggers) if x is not None]  # type: ignore[attr-defined]
    ours = ("torch.", "esper_lightning.")  # they belong to the network: a slot, a normalised weight
    hooks = [hook for part in module.modules() for hook in hooks_of(part)] if not hooked else []
    foreign_hooks = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(ours)]
    memo = {id(x): x for x in (trainer, *outside)} | {id(hook): pass_on for hook in foreign_hooks}
    copied: Any = copy_module(module, memo)
    for name, number in blocks.items():
        block_list = find_blocks(copied, name)
        deepen(block_list, sources_of(len(block_list.blocks), number, "stack"), optimizers=[])
    observer = copy.copy(trainer)
    observer.loggers = [DummyLogger() for _ in trainer.loggers]
    copied.trainer = observer
    counter = FlopCounter()

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        counter.final_backward = True
        loss.backward(*args, **kwargs)
        counter.final_backward = False

    # Methods by which a step would act on the outside do nothing, and optimizers and schedulers stand still.
    methods = ("log", "log_dict", "print", "clip_gradients", "toggle_optimizer", "untoggle_optimizer")
    replaced: dict[str, Any] = dict.fromkeys(methods, lambda *_, **__: None)
    optimizers = [IdleOptimizer(optimizer) for optimizer in trainer.optimizers]
    idle_schedulers = [IdleOptimizer(config.scheduler.optimizer) for config in trainer.lr_scheduler_configs]
    for method, idle in (("optimizers", optimizers), ("lr_schedulers", idle_schedulers)):
        result: Any = idle if len(idle) > 1 else next(iter(idle), None)
        replaced[method] = lambda *_, result=result, **__: result
    vars(copied).update(replaced | {"manual_backward": backward})
    arguments = [copy.deepcopy(batch)]
    if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
        arguments.append(batch_idx)
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    failure: Exception | None = None
    # What a step counts or schedules outside of the module is put back.
    with isolate_rng(), kept_schedules(trainer), kept_attributes(*outside):
        try:
            with eager, counter, torch.enable_grad(), trainer.precision_plugin.train_step_context():
                outputs = copied.training_step(*arguments)
                loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
                if module.automatic_optimization:
                    if not isinstance(loss, Tensor):
                        raise ValueError("the first training step gave no loss")
                    backward(loss)
        except COUNT_ERRORS as error:
            failure = error  # raised below: `isolate_rng` restores random numbers only where nothing is raised
    if failure is not None:
        raise failure
    return counter


class IdleOptimizer:
    """Optimizer or scheduler whose step only runs its closure; by type a LightningOptimizer, because a step may ask."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups = [dict(group) for group in optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups]

    def toggle_model(self, *_: object, **__: object) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return LightningOptimizer

    def step(self, closure: Callable[[], Any] | None = None, *_: object, **__: object) -> Any:
        return None if closure is None or not callable(closure) else closure()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None
