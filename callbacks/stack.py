"""Callback that trains a shallow network first and grows it to its full depth by copies of its blocks."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.call import _call_configure_model
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from esper_lightning.callbacks.checks import check_trainer, is_validation_of_fit
from esper_lightning.callbacks.grow import Grow
from esper_lightning.callbacks.run_record import open_events, write_run_record
from esper_lightning.console import print_status
from esper_lightning.envs.flops import count_training_flops, positions_per_parameter
from esper_lightning.growth import stack
from esper_lightning.growth.attach import is_compiled
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.stack import Blocks, Content, Order, State, check_blocks, check_optimizers, place
from esper_lightning.limits import has_end, share_of_training
from esper_lightning.telemetry.events import SCHEMA, STACK_FILE, EventLog, Stacked, Started, Validated

CONFLICTING_CALLBACKS = (BaseFinetuning, BatchSizeFinder, LearningRateFinder)
"""Callbacks that rearrange parameter groups, or try steps before the training."""

ROUNDING = 1e-9
"""Share of the training by which a change may come early, so that rounding does not delay it by a batch."""

MAX_STEPS = 2**53
"""Steps of a training whose end is a time."""


class Stack(Callback):
    """Takes a network down to its first blocks, trains it, and grows it to the depth that its class has built.

    The last checkpoint is that of the plain class and loads without this callback. Until the first change the training
    is bit for bit that of the small network. The guide is docs/guides/stack.md.

    Args:
        blocks: Name of the `nn.ModuleList` or `nn.Sequential` of like blocks in the LightningModule, as `net.blocks`.
        start: Number of blocks at the beginning. None: a third of those that the class builds, at least one.
        at: Share of the training, between 0 and 1, after which it grows to its full depth; or several shares, each
            with the number of blocks from then on: `{0.1: 4, 0.3: 12}`. Steps, epochs and `max_time` of the trainer
            count, whichever ends the training first.
        how: Order of the copies; see `esper_lightning.growth.stack`, also for the following ones.
        new: Content of new blocks. Those of `fresh` do not depend on the random numbers of the training.
        state: Optimizer state of new blocks.
        zero: Last layers of the residual branches for `new="zero"`.
        renumber: Called with every block and its index after a change. Needed by blocks that know their index only if
            `how` is `interleave` or `middle`: in other orders each block is the one that the class has built there.
    """

    def __init__(
        self,
        blocks: str,
        *,
        start: int | None = None,
        at: float | dict[float, int] = 0.3,
        how: Order = "stack",
        new: Content = "copy",
        state: State = "copy",
        zero: Sequence[str] = (),
        renumber: Callable[[nn.Module, int], Any] | None = None,
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
        self.options: dict[str, Any] = {"how": how, "new": new, "state": state, "zero": zero, "renumber": renumber}
        self.depths: list[int] = []
        """Numbers of blocks of the network so far."""
        self.lr_peak = 0.0  # only for the warning in `_grow` about a rate that has already fallen
        self.blocks: Any = None
        """The list in the module, once it is known."""
        self.final: list[nn.Module] = []
        """Blocks of the whole network, the first of which are in the list."""
        self._in_fit = False
        self._steps = -1
        self._loaded: dict[str, Tensor] | None = None  # weights of a grown list that is resumed
        self._told: str | None = None  # line about a change whose first loss is not known yet
        self._loss: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self.flops: dict[tuple[int, ...], int] = {}
        """FLOPs of the first training batch, forward and backward, by the depths of all lists that a `Stack` grows."""
        self.batches: dict[tuple[int, ...], int] = {}
        """Training batches so far by these depths."""
        self._counter: FlopCounterMode | None = None  # of a batch whose FLOPs are counted
        self._waits: LightningModule | None = None  # whose next `training_step` is counted
        self._log: EventLog | None = None

    @property
    def start(self) -> int:
        """Number of blocks at the beginning, once the list is known."""
        return max(1, len(self.final) // 3) if self._given_start is None else self._given_start

    @property
    def state_key(self) -> str:
        return f"Stack.{self.name}"

    # The list has as many blocks as the weights to be loaded, and its first number when optimizers are made.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.teardown(trainer, pl_module, stage)  # an earlier run may have failed
        _call_configure_model(trainer)  # Lightning calls it after this hook, where it may build the network
        blocks = self._find(pl_module)
        begins = stage == "fit" and trainer.global_step == 0
        if begins and blocks is self.blocks:
            place(blocks, self.final)  # as the class has built it, before an earlier run
        self.blocks, self.final = blocks, list(blocks)
        lists = [blocks, *(self._find(model) for model in averages_of(trainer))]
        self._handles = [each.register_load_state_dict_pre_hook(self._fit_depth()) for each in lists]
        self._in_fit = stage == "fit"
        if self._in_fit:
            self._check(trainer, pl_module)
            self.depths, self.lr_peak, self._steps = [], 0.0, -1
            self._loaded, self._told, self._loss = None, None, None
            self.flops, self.batches = {}, {}
        for each in lists if begins else ():
            place(each, list(each)[: self.start])

    def _find(self, module: nn.Module) -> Blocks:
        """Return the list of blocks in the LightningModule, or in its averaged copy (`WeightAveraging`, SWA).

        Raises ValueError if there is none, or if its blocks are not alike.
        """
        # A compiled module has its names in a module within it.
        modules = {k.replace("_orig_mod.", ""): part for k, part in module.named_modules(remove_duplicate=False)}
        found = modules.get(self.name)
        if found is not None:
            try:
                return check_blocks(getattr(found, "_orig_mod", found))  # compiled
            except ValueError as error:
                reason = f"{self.name!r} cannot grow: {error}; lists in the module"
        else:
            reason = f"there is no {self.name!r} in {type(module).__name__}; lists in it"
        lists = ", ".join(name for name, part in modules.items() if can_grow(part)) or "none"
        raise ValueError(f"Stack: {reason}: {lists}")

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise ValueError if a part of the trainer or of the module does not follow a network that grows."""
        count = len(self.final)
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
        grows_alone = (Grow,) if isinstance(trainer.strategy, DDPStrategy) else ()
        reason = "does not follow a network whose depth grows here"
        check_trainer("Stack", trainer, module, dict.fromkeys((*CONFLICTING_CALLBACKS, *grows_alone), reason))
        if not has_end(trainer):
            raise ValueError(
                "Stack: the training has no end to take a share of; give max_steps, max_epochs or max_time"
            )

    def _fit_depth(self) -> Callable[..., None]:
        """Return a hook that gives a list as many blocks as the state dict has that is about to be loaded."""

        def fit_depth(blocks: Blocks, state_dict: Mapping[str, Tensor], prefix: str, *_: object) -> None:
            saved = len({key[len(prefix) :].split(".")[0] for key in state_dict if key.startswith(prefix)})
            if blocks is self.blocks and 0 < saved <= len(self.final):
                place(blocks, self.final[:saved])
            elif 0 < saved < len(blocks):
                place(blocks, list(blocks)[:saved])
            elif saved > len(blocks):
                stack(blocks, to=saved, how="last")

        return fit_depth  # a function, so that copies of the module do not copy the callback

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._stop_counting()
        if self._log is not None:
            self._log.close()
            self._log = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_counting()

    def _stop_counting(self) -> int:
        """Return the FLOPs since counting began; 0 if they are not counted."""
        self._stop_waiting()
        counter, self._counter = self._counter, None
        if counter is None:
            return 0
        counter.__exit__(None, None, None)
        return counter.get_total_flops()

    def state_dict(self) -> dict[str, Any]:
        counts = [list(self.flops.items()), list(self.batches.items())]
        return {"depths": self.depths, "lr_peak": self.lr_peak, "counts": counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._in_fit:
            return
        self.depths, self.lr_peak = list(state_dict["depths"]), state_dict["lr_peak"]
        self.flops, self.batches = ({tuple(at): n for at, n in counted} for counted in state_dict["counts"])
        if len(self.depths) > 1:  # the optimizer is made for the first depth, as it was, and takes the rest again
            self._loaded = {name: value.clone() for name, value in self.blocks.state_dict().items()}
            place(self.blocks, self.final[: self.depths[0]])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_optimizers(trainer.optimizers, self.blocks)
        self.depths = self.depths or [len(self.blocks)]
        if self._loaded is not None:  # optimizers are made, and their states not yet loaded
            for depth in self.depths[1:]:
                self._grow_list(trainer, depth)
            self.blocks.load_state_dict(self._loaded)
            self._loaded = None
            wrap_again(trainer)

    def _grow_list(self, trainer: Trainer, to: int) -> None:
        """Grow the list into blocks that the class has built."""
        spare = nn.ModuleList(self.final[len(self.blocks) : to])
        if isinstance(trainer.strategy, DDPStrategy) and trainer.strategy._layer_sync is not None:
            trainer.strategy._layer_sync.apply(spare)
        with isolate_rng():
            torch.manual_seed(to)
            stack(self.blocks, to=to, optimizer=trainer.optimizers, into=list(spare), **self.options)
        self.final[:to] = self.blocks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log, self._began = open_events(trainer, STACK_FILE), time.perf_counter()
        if (
            self._log is not None and self is stacks_of(trainer)[0]
        ):  # several lists grow: one of them writes what all have in common
            self._log.discard_after(trainer.global_step)
            lists = [each.name for each in stacks_of(trainer)]
            steps = int(min(trainer.estimated_stepping_batches, MAX_STEPS))
            self._log.write([Started(trainer.global_step, SCHEMA, 1, steps, lists, [], "", 0, {})])
            write_run_record(self._log.path.parent, trainer)

    # The training goes on, and grows between two steps.

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Grow to the number of blocks due by the share of training done, but only between two optimizer steps."""
        # False in the middle of gradient accumulation: growing would mix gradients of two depths.
        between_steps, begins = trainer.global_step != self._steps, self._steps == -1
        self._steps = trainer.global_step
        if begins:
            self._log_blocks(trainer)
        if len(self.blocks) < len(self.final):
            lr = max(float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups)
            self.lr_peak = max(self.lr_peak, lr)
            share = share_of_training(trainer, batch_idx) + ROUNDING
            depth_from_share = self.at if isinstance(self.at, Mapping) else {self.at: len(self.final)}
            depth = max((depth for at, depth in depth_from_share.items() if share >= at), default=0)
            if between_steps and depth > len(self.blocks):
                self._grow(trainer, depth, lr)
        self._stop_counting()  # another callback may have skipped the batch before
        depths = depths_of(trainer)
        self.batches[depths] = self.batches.get(depths, 0) + 1
        if depths not in self.flops:
            self.flops[depths] = 0  # unknown, as where a part is compiled, which would run without its code
            if pl_module._compiler_ctx is None and not any(map(is_compiled, pl_module.modules())):
                self._count(pl_module)

    def _count(self, module: LightningModule) -> None:
        """Count the FLOPs from the coming `training_step` on: other callbacks may run the network before."""
        step = module.training_step

        def counted(*args: Any, **settings: Any) -> Any:
            self._stop_waiting()
            self._counter = count_training_flops()
            self._counter.__enter__()
            return step(*args, **settings)

        module.training_step, self._waits = counted, module

    def _stop_waiting(self) -> None:
        """Give the module its own `training_step` back."""
        if self._waits is not None:
            vars(self._waits).pop("training_step", None)  # another `Stack` may have been first
            self._waits = None

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization:  # by hand there may be several backward passes
            self._end_count(trainer)

    def _end_count(self, trainer: Trainer) -> None:
        if self._counter is not None:
            self.flops[depths_of(trainer)] = self._stop_counting()

    def _log_blocks(self, trainer: Trainer) -> None:
        """Write the number of blocks. Only at changes: `LightningModule.log` would take half a millisecond a batch."""
        for logger in trainer.loggers:
            logger.log_metrics({f"stack/{self.name}": float(len(self.blocks))}, step=trainer.global_step)

    def _grow(self, trainer: Trainer, to: int, lr: float) -> None:
        before = len(self.blocks)
        self._log_blocks(trainer)
        self._grow_list(trainer, to)
        self._log_blocks(trainer)
        wrap_again(trainer)
        for model in averages_of(trainer):
            average = self._find(model)
            sources = stack(average, to=to, how=self.options["how"], renumber=self.options["renumber"])
            if self.options["new"] != "copy":  # the average of a new block begins with the block
                for i in (i for i, source in enumerate(sources) if source in sources[:i]):
                    average[i].load_state_dict(self.blocks[i].state_dict())
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
        self._end_count(trainer)
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
        """Name the trainings of fixed depth that cost as much as this one."""
        self._log_blocks(trainer)
        if trainer.is_global_zero and len(self.batches) > 1 and all(self.flops.values()):
            first, *_, last = self.batches
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            unit = "training batches" if parts == 1 else f"steps of {parts} batches"  # what max_steps counts
            fixed = (
                f"{self.flops_spent // (parts * self.flops[depths]):,} at {' + '.join(map(str, depths))}"
                for depths in (last, first)
            )
            positions = positions_per_parameter(self.flops_spent, count_parameters(pl_module))
            print_status(
                f"Stack: {sum(self.batches.values()) // parts:,} {unit} cost the FLOPs of {' or '.join(fixed)} blocks "
                f"throughout, {positions:.2g} tokens per parameter; compare with such trainings, without Stack"
            )


def depths_of(trainer: Trainer) -> tuple[int, ...]:
    """Return the present numbers of blocks of all lists that a `Stack` grows."""
    return tuple(len(each.blocks) for each in stacks_of(trainer))


def stacks_of(trainer: Trainer) -> list[Stack]:
    """Return the callbacks that grow lists of blocks."""
    return [callback for callback in trainer.callbacks if isinstance(callback, Stack)]  # type: ignore[attr-defined]


def can_grow(part: nn.Module) -> bool:
    """Return True if a module is a list of like blocks, an `nn.ModuleList` or `nn.Sequential`."""
    try:
        check_blocks(part)
    except ValueError:
        return False
    return True


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
