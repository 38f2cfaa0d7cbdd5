"""Callback that trains a shallow network first and grows it to its full depth by copies of its blocks."""

import copy
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from esper_lightning.callbacks.checks import after_setup, check_trainer, is_validation_of_fit
from esper_lightning.callbacks.grow import Grow
from esper_lightning.callbacks.rerun import kept_attributes
from esper_lightning.callbacks.run_record import open_events, write_run_record
from esper_lightning.console import print_status
from esper_lightning.envs.flops import FlopCounter, positions_per_parameter
from esper_lightning.growth.blocks import Blocks, find_blocks
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.nested import copy_module, hooks_of
from esper_lightning.growth.slot import pass_on
from esper_lightning.growth.stack import (
    BuiltBlocks,
    Content,
    Order,
    State,
    check_optimizers,
    check_options,
    warn_without_gradients,
)
from esper_lightning.limits import has_end, share_of_training, timers_of
from esper_lightning.telemetry.events import SCHEMA, STACK_FILE, EventLog, Stacked, Started, Validated

CONFLICTING_CALLBACKS = (BaseFinetuning, BatchSizeFinder, LearningRateFinder)
"""Callbacks that rearrange parameter groups, or try steps before the training."""

COUNT_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ArithmeticError)
"""Exceptions of a training step that does not run on a copy of its module."""

ROUNDING = 1e-9
"""Share of the training by which a change may come early, so that rounding does not delay it by a batch."""

SHALLOW: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Number of blocks that the class has built, for each list that a `Stack` has taken down."""

MAX_STEPS = 2**53
"""Steps of a training whose end is a time."""


class Stack(Callback):
    """Takes a network down to its first blocks, trains it, and grows it to the depth that its class has built.

    The last checkpoint is that of the plain class and loads without this callback. Until the first change the training
    is bit for bit that of the small network. Blocks keep the index and the buffers that the class gave them at their
    place, and a configuration of the network holds the present number of blocks. The guide is docs/guides/stack.md.

    Args:
        blocks: Name of the `nn.ModuleList` or `nn.Sequential` of like blocks in the LightningModule, as `net.blocks`;
            `net.blocks[1:]` leaves out the first block, and the numbers below count the others.
        start: Number of blocks at the beginning. None: a third of those that the class builds, at least one; blocks
            that hold trained weights are then refused, because the others would be lost.
        at: Share of the training, between 0 and 1, after which it grows to its full depth; or several shares, each
            with the number of blocks from then on: `{0.1: 4, 0.3: 12}`. Steps, epochs and `max_time` of the trainer
            count, whichever ends the training first.
        order: Sources of the blocks; see `esper_lightning.growth.stack`, also for the following ones. Sources one by
            one or in ranges fit a single change.
        new: Content of new blocks. Those of `fresh` do not depend on the random numbers of the training.
        state: Optimizer state of new blocks.
        zero: Last layers of the residual branches for `new="zero"`.
    """

    def __init__(
        self,
        blocks: str,
        *,
        start: int | None = None,
        at: float | dict[float, int] = 0.3,
        order: Order = "stack",
        new: Content = "copy",
        state: State = "copy",
        zero: Sequence[str] = (),
    ) -> None:
        shares = list(at) if isinstance(at, Mapping) else [at]
        depths = [1 if start is None else start, *(at.values() if isinstance(at, Mapping) else ())]
        if not shares or not 0.0 < min(shares) <= max(shares) < 1.0:
            raise ValueError(f"Stack: at must lie between 0 and 1, got {at}")
        if depths[0] < 1:
            raise ValueError(f"Stack: start must be at least 1 block, got {start}")
        if any(a >= b for numbers in (shares, depths) for a, b in pairwise(numbers)):
            raise ValueError(f"Stack: shares and numbers of blocks must increase from start = {depths[0]} on, got {at}")
        self.name = blocks
        self._given_start = start
        self.at = at
        self.options: dict[str, Any] = {"order": order, "new": new, "state": state, "zero": zero}
        self.depths: list[int] = []
        """Numbers of blocks of the network so far."""
        self.lr_peak = 0.0  # only for the warning in `_grow` about a rate that has already fallen
        self.built: Any = None
        """The list in the module with all blocks that the class has built, once it is known."""
        self._lists: list[BuiltBlocks] = []  # that of the module, then those of its averaged copies
        self._loading: Trainer | None = None  # from the end of `setup` to the first batch: weights may be loaded
        self._depth_before: dict[int, int] = {}  # of lists into which the module itself loads a state, by id
        self._was_loaded = False  # by the module itself, and not from a checkpoint of the Trainer
        self._begins = False
        self._steps = -1
        self._loaded: dict[str, Any] | None = None  # weights of a grown list that is resumed
        self._told: str | None = None  # line about a change whose first loss is not known yet
        self._loss: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self.flops: dict[tuple[int, ...], int] = {}
        """FLOPs of a training batch, forward and backward, by the depths of all lists that grow; 0 if not known."""
        self.batches: dict[tuple[int, ...], int] = {}
        """Training batches so far by these depths."""
        self._log: EventLog | None = None

    @property
    def start(self) -> int:
        """Number of blocks at the beginning, once the list is known."""
        return max(1, self.built.most // 3) if self._given_start is None else self._given_start

    @property
    def state_key(self) -> str:
        return f"Stack.{self.name}"

    # The list has as many blocks as the weights to be loaded, and its first number when optimizers are made.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.teardown(trainer, pl_module, stage)  # an earlier run may have failed
        self._was_loaded = False
        for part in pl_module.modules():  # the module may load weights in its own `setup`
            if isinstance(part, Blocks):
                self._handles += LoadHook(self).register(part)
        after_setup(trainer, pl_module, lambda: self._begin(trainer, pl_module, stage))

    def _begin(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Find the list, which the module may have built in its own `setup`, and take it down to its first blocks."""
        self._end_loading()
        self._begins = stage == "fit" and trainer.global_step == 0
        self._lists = [self._find(each, trainer) for each in (module, *averages_of(trainer))]
        self.built, *averages = self._lists
        for each in averages:  # made of a network that was shallow already
            missing = self.built.whole[each.before_end : self.built.before_end]
            each.whole[each.before_end : each.before_end] = map(copy_module, missing)
        if stage == "fit":
            self._check(trainer, module)
            self.depths, self.lr_peak, self._steps = [], 0.0, -1
            self._loaded, self._told, self._loss = None, None, None
            self.flops, self.batches = {}, {}
        for each in self._lists:
            self._handles += LoadHook(self).register(each.found.modules)
            SHALLOW[each.found.modules] = len(each.whole)
            if self._begins:
                each.show(self.start)
        self._loading = trainer

    def _find(self, module: nn.Module, trainer: Trainer) -> BuiltBlocks:
        """Return the list of blocks in the LightningModule, or in its averaged copy (`WeightAveraging`, SWA).

        Raises ValueError if there is none, if its blocks are not alike, or if somebody else has it.
        """
        with in_own_name():
            found = find_blocks(module, self.name)
        for each in stacks_of(trainer):
            if each is not self and any(found.modules is other.found.modules for other in each._lists):
                raise ValueError(
                    f"Stack: {self.name!r} and {each.name!r} are one list, and one Stack grows it; give at={{share: "
                    f"blocks, …}} for several changes"
                )
        known = [each for each in self._lists if each.found.modules is found.modules]
        if known:  # after an earlier run the list may hold a part of its blocks
            return known[0]
        most = SHALLOW.get(found.modules, 0)
        if most > len(found.modules):
            raise ValueError(
                f"Stack: {self.name!r} has {len(found.modules)} of the {most} blocks that its class has built, since "
                f"an earlier training ended before it had grown; build the module anew"
            )
        return BuiltBlocks(found)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise ValueError if a part of the trainer or of the module does not follow a network that grows."""
        count = self.built.most
        last = list(self.at.values())[-1] if isinstance(self.at, Mapping) else count
        if self.start >= count:
            raise ValueError(
                f"Stack: start must be below {count}, the number of blocks that the module builds in {self.name!r}, "
                f"got {self.start}; build the final network, or start with fewer blocks"
            )
        if isinstance(self.at, Mapping) and next(iter(self.at.values())) <= self.start:
            raise ValueError(f"Stack: at must begin with more than {self.start} blocks, got {self.at}; give start")
        if last != count:
            raise ValueError(
                f"Stack: the module builds {count} blocks in {self.name!r}, and at ends with {last}; build the final "
                f"network"
            )
        with in_own_name():
            check_options(self.built.found.blocks, **self.options)
        if elsewhere := self.built.run_elsewhere():
            raise ValueError(
                f"Stack: blocks of {self.name!r} are also in {elsewhere}, by which the network would run them before "
                f"it has grown; let it run those of the list alone"
            )
        grows_alone = (Grow,) if isinstance(trainer.strategy, DDPStrategy) else ()
        reason = "does not follow a network whose depth grows here"
        check_trainer("Stack", trainer, module, dict.fromkeys((*CONFLICTING_CALLBACKS, *grows_alone), reason))
        if not has_end(trainer):
            raise ValueError(
                "Stack: the training has no end to take a share of; give max_steps, max_epochs or max_time"
            )

    def fit_depth(self, modules: Blocks, saved: int) -> None:
        """Give a list as many blocks as the state that is about to be loaded into it has.

        If the module itself loads it, before the first batch, the list has its present number again afterwards.
        """
        restores = self._loading is not None and self._loading._checkpoint_connector._loaded_checkpoint
        self._was_loaded |= not restores
        for built in (each for each in self._lists if each.found.modules is modules and self._loading is not None):
            before, depth = built.depth, saved - built.found.before - built.found.behind
            if depth != before and 0 < depth <= built.most:
                built.show(depth)
                if not restores:
                    self._depth_before[id(modules)] = before

    def fit_depth_again(self, modules: Blocks) -> None:
        """Give a list the number of blocks that it had before its module has loaded a state."""
        for built in (each for each in self._lists if id(modules) in self._depth_before):
            if built.found.modules is modules:
                built.show(self._depth_before.pop(id(modules)))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end_loading()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _end_loading(self) -> None:
        """Take the hooks off the network: in a training it holds nothing of this callback, and can be pickled."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._loading = [], None

    def state_dict(self) -> dict[str, Any]:
        counts = [list(self.flops.items()), list(self.batches.items())]
        return {"depths": self.depths, "lr_peak": self.lr_peak, "counts": counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._loading is None or self._loading.state.fn != TrainerFn.FITTING:
            return
        self.depths, self.lr_peak = list(state_dict["depths"]), state_dict["lr_peak"]
        self.flops, self.batches = ({tuple(at): n for at, n in counted} for counted in state_dict["counts"])
        if len(self.depths) > 1:  # the optimizer is made for the first depth, as it was, and takes the rest again
            saved = self.built.found.modules.state_dict()
            self._loaded = {name: x.clone() if isinstance(x, Tensor) else copy.deepcopy(x) for name, x in saved.items()}
            self.built.show(self.depths[0])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._find(pl_module, trainer) is not self.built:
            raise ValueError(
                f"Stack: {self.name!r} was built a second time after setup; build it in __init__, setup or "
                f"configure_model"
            )
        with in_own_name():
            check_optimizers(trainer.optimizers, self.built.found.blocks)
        self._begins &= not trainer._checkpoint_connector._loaded_checkpoint
        self.depths = self.depths or [self.built.depth]
        if self._loaded is not None:  # optimizers are made, and their states not yet loaded
            for depth in self.depths[1:]:
                self._grow_list(trainer, depth)
            self.built.found.modules.load_state_dict(self._loaded)
            self._loaded = None
            wrap_again(trainer)

    def _grow_list(self, trainer: Trainer, to: int) -> list[int]:
        """Grow the list into blocks that the class has built, and return the places of copies."""
        if isinstance(trainer.strategy, DDPStrategy) and trainer.strategy._layer_sync is not None:
            trainer.strategy._layer_sync.apply(nn.ModuleList(self.built.spare(to)))
        with isolate_rng(), in_own_name():
            torch.manual_seed(to)
            return self.built.grow(to, trainer.optimizers, **self.options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            begins = "begins" if self._begins else "goes on"
            print_status(f"Stack: {self.name} {begins} with {self.built.depth} of {self.built.most} blocks")
        if math.isinf(trainer.num_training_batches) and trainer.max_steps < 1 and not any(timers_of(trainer)):
            rank_zero_warn(
                f"Stack: the loader does not tell its length, so the share of the training is known between epochs "
                f"alone; give max_steps, or {self.name} may grow late or never"
            )
        self._log, self._began = open_events(trainer, STACK_FILE), time.perf_counter()
        # Several lists may grow: one callback writes what all have in common.
        if self._log is not None and self is stacks_of(trainer)[0]:
            self._log.discard_after(trainer.global_step)
            lists = [each.name for each in stacks_of(trainer)]
            steps = int(min(trainer.estimated_stepping_batches, MAX_STEPS))
            self._log.write([Started(trainer.global_step, SCHEMA, 1, steps, lists, [], "", 0, {})])
            write_run_record(self._log.path.parent, trainer)

    # The training goes on, and grows between two steps.

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Grow to the number of blocks due by the share of training done, but only between two optimizer steps."""
        # False in the middle of gradient accumulation: growing would mix gradients of two depths.
        between_steps, first = trainer.global_step != self._steps, self._steps == -1
        self._steps = trainer.global_step
        if first:
            self._first_batch(trainer)
        if self.built.depth < self.built.most:
            lr = max(float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups)
            self.lr_peak = max(self.lr_peak, lr)
            share = share_of_training(trainer, batch_idx) + ROUNDING
            depth_from_share = self.at if isinstance(self.at, Mapping) else {self.at: self.built.most}
            depth = max((depth for at, depth in depth_from_share.items() if share >= at), default=0)
            if between_steps and depth > self.built.depth:
                self._grow(trainer, depth, lr)
        depths = depths_of(trainer)
        self.batches[depths] = self.batches.get(depths, 0) + 1
        if depths not in self.flops:
            self.flops[depths] = self._count(trainer, pl_module, batch, batch_idx)

    def _first_batch(self, trainer: Trainer) -> None:
        self._end_loading()
        with in_own_name():
            self.built.check_present()
        trained = self._was_loaded or any(map(is_trained, self.built.whole))
        if self._begins and self._given_start is None and trained:
            for each in self._lists:
                each.show(each.most)
            raise ValueError(
                f"Stack: the {self.built.most} blocks of {self.name!r} hold trained weights, and all but the first "
                f"{self.start} would be lost; give start={self.start} if that is meant, or train without Stack"
            )
        self._log_blocks(trainer)

    def _count(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> int:
        """Return the FLOPs of the coming training step; 0, with one warning in a training, if they cannot be known."""
        others = (flops for each in stacks_of(trainer) for flops in [each.flops.get(depths_of(trainer))])
        known = next((flops for flops in others if flops is not None), None)
        if known is not None:
            return known
        try:
            return count_step_flops(trainer, module, batch, batch_idx)
        except COUNT_ERRORS as error:
            if 0 not in self.flops.values():
                reason = " ".join(str(error).split())
                rank_zero_warn(
                    f"Stack: the FLOPs of a training step are not known, because it does not run on a copy of the "
                    f"module ({type(error).__name__}: {reason:.200}); the training goes on without them"
                )
            return 0

    def _log_blocks(self, trainer: Trainer) -> None:
        """Write the number of blocks. Only at changes: `LightningModule.log` would take half a millisecond a batch."""
        for logger in trainer.loggers:
            logger.log_metrics({f"stack/{self.name}": float(self.built.depth)}, step=trainer.global_step)

    def _grow(self, trainer: Trainer, to: int, lr: float) -> None:
        before = self.built.depth
        self._log_blocks(trainer)
        copies = self._grow_list(trainer, to)
        self._log_blocks(trainer)
        wrap_again(trainer)
        warn_without_gradients(self.built.found, [self.built.whole[i] for i in copies])
        for average in self._lists[1:]:
            average.grow(to, (), order=self.options["order"], new="copy", state="copy")
            if self.options["new"] != "copy":  # the average of a new block begins with the block
                for i in copies:
                    average.whole[i].load_state_dict(self.built.whole[i].state_dict())
        self.depths.append(to)
        if self._log is not None:
            self._log.write([Stacked(trainer.global_step, self.name, before, to)])
        self._told = f"Stack, step {trainer.global_step}: {self.name} {before} → {to}, training loss "
        self._told += self._last_loss(trainer)
        if lr < 0.99 * self.lr_peak:
            rank_zero_warn(
                f"Stack: the learning rate has fallen from {self.lr_peak:.3g} to {lr:.3g} before {self.name} grows; "
                f"grow earlier, or keep the rate constant until then"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._loss = loss.detach() if isinstance(loss, Tensor) else None
        if self._told is not None:
            if trainer.is_global_zero:
                print_status(f"{self._told} → {self._last_loss(trainer)}")
            self._told = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._log is None or not is_validation_of_fit(trainer) or self is not stacks_of(trainer)[0]:
            return
        step, size = trainer.global_step, count_parameters(pl_module)
        metrics: dict[str, float | None] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        seconds = time.perf_counter() - self._began
        self._log.write([Validated(step, step, size, float(self.flops_spent), seconds, metrics)])

    @property
    def flops_spent(self) -> int:
        """FLOPs of the training so far; too few where they could not be counted."""
        return sum(self.flops[depths] * count for depths, count in self.batches.items())

    def _last_loss(self, trainer: Trainer) -> str:
        """Return the loss of the last batch as text. Lightning has divided it by the number of accumulated batches."""
        if self._loss is None:
            return "unknown"
        parts = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
        return f"{float(self._loss.float().mean()) * parts:.3f}"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what has not grown, and name the trainings of fixed depth that cost as much as this one."""
        self._log_blocks(trainer)
        depth, most = self.built.depth, self.built.most
        if trainer.is_global_zero and depth < most:
            print_status(
                f"Stack: {self.name} has {depth} of {most} blocks at the end, as no batch was due after at={self.at}; "
                f"build the class with {depth} to load the last checkpoint"
            )
        if trainer.is_global_zero and len(self.batches) > 1 and all(self.flops.values()):
            first, *_, last = self.batches
            batches, steps = sum(self.batches.values()), trainer.global_step
            # What max_steps counts: batches, or steps of several ones.
            number = steps if pl_module.automatic_optimization and 0 < steps < batches else batches
            unit = "training batches" if number == batches else f"steps of {batches / number:.3g} batches"
            fixed = (
                f"{int(self.flops_spent / self.flops[depths] * number / batches):,} at {' + '.join(map(str, depths))}"
                for depths in (last, first)
            )
            positions = positions_per_parameter(self.flops_spent, count_parameters(pl_module))
            print_status(
                f"Stack: {number:,} {unit} cost the FLOPs of {' or '.join(fixed)} blocks "
                f"throughout, {positions:.2g} tokens per parameter; compare with such trainings, without Stack"
            )


class LoadHook:
    """Hook on a list of blocks, before and after a state dict is loaded into it.

    A copy of the network, or a file of it, holds the hook without the callback; it then does nothing.
    """

    def __init__(self, callback: Stack | None = None) -> None:
        self.callback = callback

    def __reduce__(self) -> tuple[type["LoadHook"], tuple[()]]:
        return LoadHook, ()

    def register(self, modules: Blocks) -> list[RemovableHandle]:
        return [
            modules.register_load_state_dict_pre_hook(self.before),
            modules.register_load_state_dict_post_hook(self.after),
        ]

    def before(self, modules: Any, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
        saved = len({key[len(prefix) :].split(".")[0] for key in state_dict if key.startswith(prefix)})
        if self.callback is not None:
            self.callback.fit_depth(modules, saved)

    def after(self, modules: Any, *_: object) -> None:
        if self.callback is not None:
            self.callback.fit_depth_again(modules)


@contextmanager
def in_own_name() -> Iterator[None]:
    """Let an error of `growth.stack` begin with the name of the callback."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"Stack: {str(error).removeprefix('stack: ')}") from None


def depths_of(trainer: Trainer) -> tuple[int, ...]:
    """Return the present numbers of blocks of all lists that a `Stack` grows."""
    return tuple(each.built.depth for each in stacks_of(trainer))


def stacks_of(trainer: Trainer) -> list[Stack]:
    """Return the callbacks that grow lists of blocks."""
    return [callback for callback in trainer.callbacks if isinstance(callback, Stack)]  # type: ignore[attr-defined]


def is_trained(block: nn.Module) -> bool:
    """Return True if a scale, as that of a normalisation, has learned: classes build them of equal numbers."""
    weights = [getattr(part, "weight", None) for part in block.modules()]
    scales = [weight for weight in weights if isinstance(weight, Tensor) and weight.ndim == 1 and len(weight)]
    return any(bool((scale != scale[0]).any()) for scale in scales)


def averages_of(trainer: Trainer) -> Iterator[nn.Module]:
    """Yield the copies of the LightningModule that callbacks of Lightning average into."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging) and callback._average_model is not None:
            model = callback._average_model
            yield model.module if isinstance(model, AveragedModel) else model


def wrap_again(trainer: Trainer) -> None:
    """Let DistributedDataParallel know the parameters that the network has now."""
    if isinstance(trainer.strategy, DDPStrategy):
        trainer.strategy.model = trainer.lightning_module
        gc.collect()  # releases the hooks of the former wrapper on the parameters
        trainer.strategy.configure_ddp()


def count_step_flops(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> int:
    """Return the FLOPs of a training step, forward and backward, without what checkpointed parts compute again.

    The step runs on a copy of the module and of the batch, with the module's optimizers and loggers replaced, so that
    the training does not notice. Raises an exception of COUNT_ERRORS if it does not run there.
    """
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError("training_step takes batches from the loader itself")
    try:
        return _count_on_copy(trainer, module, batch, batch_idx, hooked=False)
    except COUNT_ERRORS:  # a step may need what hooks on its modules collect
        return _count_on_copy(trainer, module, batch, batch_idx, hooked=True)


def _count_on_copy(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, *, hooked: bool) -> int:
    """Return the FLOPs of a step on a copy. Without `hooked`, hooks that are not torch's or ours do not run."""
    outside = [x for x in (trainer.datamodule, *trainer.callbacks, *trainer.loggers) if x is not None]  # type: ignore[attr-defined]
    ours = ("torch.", "esper_lightning.")  # they belong to the network: a slot, a normalised weight
    foreign = [hook for part in module.modules() for hook in hooks_of(part)] if not hooked else []
    foreign = [hook for hook in foreign if not str(getattr(hook, "__module__", "")).startswith(ours)]
    memo = {id(x): x for x in (trainer, *outside)} | {id(hook): pass_on for hook in foreign}
    copied: Any = copy_module(module, memo)
    observer = copy.copy(trainer)
    observer.loggers = [DummyLogger() for _ in trainer.loggers]
    copied.trainer = observer
    counter = FlopCounter()

    def backward(loss: Tensor, *_: object, **__: object) -> None:
        counter.final_backward = True
        loss.backward()
        counter.final_backward = False

    def nothing(*_: object, **__: object) -> None:
        pass

    idle = [IdleOptimizer(optimizer) for optimizer in trainer.optimizers]
    replaced: dict[str, Any] = dict.fromkeys(("log", "log_dict", "print", "clip_gradients"), nothing)
    replaced |= dict.fromkeys(("toggle_optimizer", "untoggle_optimizer"), nothing)
    replaced |= dict.fromkeys(("optimizers", "lr_schedulers"), lambda *_, **__: idle if len(idle) > 1 else idle[0])
    vars(copied).update(replaced | {"manual_backward": backward})
    arguments = [copy.deepcopy(batch)]
    if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
        arguments.append(batch_idx)
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    # What a step counts or schedules outside of the module is put back.
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    with isolate_rng(), kept_attributes(*outside, *schedulers):
        try:
            with eager, counter, torch.enable_grad(), trainer.precision_plugin.train_step_context():
                outputs = copied.training_step(*arguments)
                loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
                if module.automatic_optimization and isinstance(loss, Tensor):
                    backward(loss)
        finally:
            for group, values in zip(groups, options, strict=True):
                group.update(values)
    return counter.total


class IdleOptimizer:
    """Stands in for an optimizer, or a scheduler, whose step must not happen; it runs a closure for the step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups = [dict(group) for group in optimizer.param_groups]

    def step(self, closure: Callable[[], Any] | None = None, *_: object, **__: object) -> Any:
        return None if closure is None or not callable(closure) else closure()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None
