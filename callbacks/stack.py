"""Callback that trains a shallow network first and grows it to its full depth by copies of its blocks."""

import copy
import gc
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from numbers import Integral
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from esper_lightning.callbacks.batch_cost import COUNT_ERRORS, BatchCost, measure_batch
from esper_lightning.callbacks.checks import (
    after_setup,
    check_processes,
    check_resumed,
    check_trainer,
    ends_trial,
    is_copy,
    is_validation_of_fit,
)
from esper_lightning.callbacks.grow import Grow
from esper_lightning.callbacks.plans import DIGITS, Plan, Progress, Shares, make_plan
from esper_lightning.callbacks.run_record import open_events, write_run_record
from esper_lightning.growth.block_optimizers import check_optimizers, warn_without_gradients
from esper_lightning.growth.block_parts import kept_elsewhere
from esper_lightning.growth.blocks import Blocks, depth_in_state, errors_of, find_blocks
from esper_lightning.growth.built_blocks import BuiltBlocks
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.param_groups import hooked_optimizers
from esper_lightning.growth.stack import Content, Order, State, check_options, listed_order, one_count, sources_of
from esper_lightning.runtime.console import print_status
from esper_lightning.runtime.limits import has_end, share_of_training, timers_of
from esper_lightning.runtime.nested import copy_module
from esper_lightning.telemetry.events import SCHEMA, STACK_FILE, EventLog, Stacked, Started, Validated

CONFLICTING_CALLBACKS = (BaseFinetuning, BatchSizeFinder)
"""Callbacks that rearrange parameter groups, or try a size of the network that does not stay."""

ONE_CHANGE = "Stack: sources one by one are those of a single change; give one share in at, or order by its name"
IDLE_STEPS = 10  # after so many steps nobody looks any more for parts that do not grow along
PARTS = 4  # a network begins with one of so many parts of its blocks, if nothing else is asked for

SHALLOW: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Number of blocks that the class has built, for each list that a `Stack` has taken down."""

LEFT: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""Weight of the first block at the end of a training, for each list that a `Stack` has grown."""


class Stack(Callback):
    """Takes a network down to its first blocks, trains it, and grows it to the depth that its class has built.

    The last checkpoint is that of the plain class and loads without this callback. Until the first change the training
    is bit for bit that of the small network. Blocks keep the index and the buffers that the class gave them at their
    place, and a configuration of the network holds the present number of blocks. See docs/methods/stack.md.

    Args:
        blocks: Name of the `nn.ModuleList` or `nn.Sequential` of like blocks in the LightningModule, as `net.blocks`;
            `net.blocks[1:]` leaves out the first block, and the numbers below count the others.
        start: Number of blocks at the beginning. None: a quarter of those that the class builds, at least one; blocks
            that hold trained weights are then refused, because the others would be lost.
        at: Share of the training, between 0 and 1, after which it grows to its full depth; or several shares, each
            with the number of blocks from then on: `{0.1: 4, 0.3: 12}`. None: unless there is a plan, the number
            doubles until all are there, after equal shares: a network of four blocks has one, two and four of them for
            a third of the training each. The learning rate should be constant until the last change.
        plan: What decides in place of `at` how deep the network is: `scaling`, a rule that grows while at least 15
            targets are to come for each parameter; `tamiyo_depth`, the policy of the package for depth; the file of a
            policy; a function from `Progress` to the number of blocks, or its import path. The network may end with
            fewer blocks.
        order, new, state, zero: See `esper_lightning.growth.stack`. An `order` given as a list or as ranges allows one
            change only. Fresh weights are drawn from an RNG seed of their own.
    """

    def __init__(
        self,
        blocks: str,
        *,
        start: int | None = None,
        at: float | dict[float, int] | None = None,
        plan: str | Plan | None = None,
        order: Order = "stack",
        new: Content = "copy",
        state: State = "copy",
        zero: Sequence[str] = (),
    ) -> None:
        if at is not None and plan is not None:
            raise ValueError("Stack: at is a plan of its own; give at or plan")
        shares = list(at) if isinstance(at, Mapping) else [] if at is None else [at]
        depths = [1 if start is None else start, *(at.values() if isinstance(at, Mapping) else ())]
        if at is not None and not (shares and 0.0 < min(shares) <= max(shares) < 1.0):
            raise ValueError(f"Stack: at must lie between 0 and 1, got {at}")
        if depths[0] < 1:
            raise ValueError(f"Stack: start must be at least 1 block, got {start}")
        if any(a >= b for numbers in (shares, depths) for a, b in pairwise(numbers)):
            raise ValueError(f"Stack: shares and numbers of blocks must increase from start = {depths[0]} on, got {at}")
        self.name = blocks
        self._given_start = start
        self.plan: Any = make_plan(Shares(at) if plan is None else plan)
        self._plan_name = plan if isinstance(plan, str) else type(self.plan).__name__
        self._first_plan = copy.deepcopy(self.plan.state_dict()) if hasattr(self.plan, "state_dict") else None
        with errors_of("Stack"):
            if listed_order(order) is not None and plan is not None:
                raise ValueError(ONE_CHANGE)
        self.options: dict[str, Any] = {"order": order, "new": new, "state": state, "zero": zero}
        self.built: Any = None  # the module's list with all blocks that the class has built, once it is known
        self._lists: list[BuiltBlocks] = []  # that of the module, then those of its averaged copies
        self._loading: Trainer | None = None  # from the end of `setup` to the first batch: weights may be loaded
        self._was_loaded = False  # by the module itself, and not from a checkpoint of the Trainer
        self._begins = self._resumes = False
        self._handles: list[RemovableHandle] = []
        self._log: EventLog | None = None
        self._forget_training()

    def _forget_training(self) -> None:
        """Reset all that belongs to one training."""
        self.depths: list[int] = []  # numbers of blocks of the network so far
        self.lr_peak = 0.0  # only for the warning in `_grow` about a rate that has already fallen
        self._steps = -1  # optimizer steps before the last batch; -1: no batch has begun
        self._warned_of_idle = False
        self._own_steps = 0  # those that optimizers count themselves: a module may step SAM's inner one past Lightning
        self._loaded: dict[str, Any] | None = None  # weights of a grown list that is resumed
        self._change_line: str | None = None  # line about a change whose first loss is not known yet
        self._loss: Tensor | None = None
        self.cost: BatchCost | None = None  # of a training batch; None if it is not known
        self.flops_spent = 0  # FLOPs of the training so far, of all processes
        self.batches = 0  # training batches so far
        self._metrics: dict[str, float] = {}  # of the last validation
        self._parameters: dict[int, int] = {}  # of the module, by number of blocks
        self._share, self._batches_at_share = 0.0, 0  # share of the training, and batches when it was reached
        if self._first_plan is not None:  # what the plan remembers is of an earlier training
            self.plan.load_state_dict(copy.deepcopy(self._first_plan))

    @property
    def start(self) -> int:
        """Number of blocks at the beginning, once the list is known."""
        return max(1, self.built.most // PARTS) if self._given_start is None else self._given_start

    @property
    def state_key(self) -> str:
        return f"Stack.{self.name}"

    # While weights are loaded, the list has as many blocks as they have; when optimizers are made, its first number.

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
        self._begins, self._resumes = stage == "fit" and trainer.global_step == 0, False
        self._lists = [self._find(network, trainer) for network in (module, *averages_of(trainer))]
        self.built, *averages = self._lists
        for average in averages:  # copied from a network that was shallow already
            missing = self.built.blocks[average.end : self.built.end]
            average.blocks[average.end : average.end] = map(copy_module, missing)
        if stage == "fit":
            self._check(trainer, module)
            self._forget_training()
        for built in self._lists:
            modules = built.block_list.modules
            self._handles += LoadHook(self).register(modules)
            SHALLOW[modules] = max(len(built.blocks), SHALLOW.get(modules, 0))
            if self._begins:
                built.show(self.start)
        self._loading = trainer
        if isinstance(trainer.strategy, ModelParallelStrategy):
            self._grow_before_loading(trainer, trainer.strategy)

    def _grow_before_loading(self, trainer: Trainer, strategy: ModelParallelStrategy) -> None:
        """Let the list grow to the depth of a checkpoint just before a strategy loads it, with optimizer states."""
        load_checkpoint = strategy.load_checkpoint

        def grow_and_load(checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
            path = Path(strategy.broadcast(checkpoint_path))
            file = path / _METADATA_FILENAME if path.is_dir() else path
            saved = torch.load(file, "cpu", mmap=True, weights_only=weights_only)
            depths = saved.get("callbacks", {}).get(self.state_key, {}).get("depths", [self.built.depth])
            if trainer.state.fn != TrainerFn.FITTING:
                self.built.show(depths[-1])
                strategy.optimizers = []  # else states are loaded into the optimizers of an earlier training
            elif depths[0] != self.built.depth:
                raise ValueError(
                    f"Stack: {path} began with {depths[0]} blocks of {self.name!r}; give start={depths[0]}"
                )
            else:
                for depth in depths[1:]:
                    self._grow_list(trainer, depth)
            return load_checkpoint(checkpoint_path, weights_only=weights_only)

        vars(strategy)["load_checkpoint"] = grow_and_load

    def _find(self, module: nn.Module, trainer: Trainer) -> BuiltBlocks:
        """Return the list of blocks in the module or its average. Raises ValueError if there is none that may grow."""
        with errors_of("Stack"):
            block_list = find_blocks(module, self.name)
        for other in stacks_of(trainer):
            if other is not self and other.plan is self.plan and hasattr(self.plan, "load_state_dict"):
                raise ValueError(
                    f"Stack: {self.name!r} and {other.name!r} have one plan, which remembers something; give each "
                    f"a plan of its own"
                )
            if other is not self and any(block_list.modules is built.block_list.modules for built in other._lists):
                raise ValueError(
                    f"Stack: {self.name!r} and {other.name!r} are one list, and one Stack grows it; give at={{share: "
                    f"blocks, …}} for several changes"
                )
        for built in self._lists:  # after an earlier run the list may hold a part of its blocks
            if built.block_list.modules is block_list.modules:
                return built
        most = SHALLOW.get(block_list.modules, 0)
        if trainer.state.fn == TrainerFn.FITTING and most > len(block_list.modules):
            raise ValueError(
                f"Stack: {self.name!r} has {len(block_list.modules)} of the {most} blocks that its class has built, "
                f"since an earlier training ended before it had grown; build the module anew"
            )
        return BuiltBlocks(block_list)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise ValueError if a part of the trainer or of the module does not follow a network that grows."""
        most = self.built.most
        if not isinstance(self.plan, Shares):  # shares end with all blocks that this process has built, too
            check_processes("Stack(plan=…)", trainer)
        if self.start >= most:
            raise ValueError(
                f"Stack: start must be below {most}, the number of blocks that the module builds in {self.name!r}, "
                f"got {self.start}; build the final network, or start with fewer blocks"
            )
        if isinstance(self.plan, Shares):
            depths = list(self.plan.changes(self.start, most).values())
            if depths[0] <= self.start:
                raise ValueError(
                    f"Stack: at must begin with more than {self.start} blocks, got {self.plan.at}; give start"
                )
            if depths[-1] != most:
                raise ValueError(
                    f"Stack: the module builds {most} blocks in {self.name!r}, and at ends with {depths[-1]}; build "
                    f"the final network"
                )
            if len(depths) > 1 and listed_order(self.options["order"]) is not None:
                raise ValueError(ONE_CHANGE)
        with errors_of("Stack"):
            check_options(self.built.block_list.blocks, **self.options)
            sources_of(self.start, most, self.options["order"])
        if elsewhere := self.built.run_elsewhere():
            raise ValueError(
                f"Stack: blocks of {self.name!r} are also in {elsewhere}, by which the network would run them before "
                f"it has grown; let it run those of the list alone"
            )
        # With DDP both `Grow` and this callback would wrap the network anew.
        alone = (*CONFLICTING_CALLBACKS, *((Grow,) if isinstance(trainer.strategy, DDPStrategy) else ()))
        conflicting: dict[type, str] = dict.fromkeys(alone, "does not follow a network whose depth grows here")
        if isinstance(trainer.strategy, ModelParallelStrategy):
            conflicting[LearningRateFinder] = "is not undone by Lightning where parameters are sharded"
        check_trainer("Stack", trainer, module, conflicting=conflicting, strategies=(ModelParallelStrategy,))
        if isinstance(trainer.strategy, ModelParallelStrategy) and trainer.strategy.device_mesh.size(1) > 1:
            raise ValueError("Stack: layers that processes share cannot be copied; set tensor_parallel_size=1")
        if not has_end(trainer):
            raise ValueError(
                "Stack: the training has no end to take a share of; give max_steps, max_epochs or max_time"
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end_loading()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _end_loading(self) -> None:
        """Remove the hooks of this callback from the network, which can then be pickled during the training."""
        for handle in self._handles:
            handle.remove()
        if self._loading is not None:
            vars(self._loading.strategy).pop("load_checkpoint", None)
        self._handles, self._loading = [], None

    def state_dict(self) -> dict[str, Any]:
        return {
            "depths": self.depths,
            "lr_peak": self.lr_peak,
            "cost": self.cost and self.cost._asdict(),
            "flops_spent": self.flops_spent,
            "batches": self.batches,
            "metrics": self._metrics,
            "clock": [self._share, self._batches_at_share],
            "plan": (self._plan_name, self.plan.state_dict() if hasattr(self.plan, "state_dict") else None),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a training that is resumed, and give the list its first depth, for the optimizers."""
        trainer = self._loading
        if trainer is None or trainer.state.fn != TrainerFn.FITTING or ends_trial(trainer):
            return
        self.depths, self.lr_peak = list(state_dict["depths"]), state_dict["lr_peak"]
        self.cost = BatchCost(**state_dict["cost"]) if state_dict["cost"] else None
        self.flops_spent, self.batches = state_dict["flops_spent"], state_dict["batches"]
        self._metrics = dict(state_dict["metrics"])
        self._share, self._batches_at_share = state_dict["clock"]
        plan_name, plan_state = state_dict["plan"]
        if plan_name == self._plan_name and hasattr(self.plan, "load_state_dict"):
            self.plan.load_state_dict(plan_state)
        self._begins = False
        # Optimizers are made for the first depth, as in the first run. `on_fit_start` adds the other blocks to them.
        if len(self.depths) > 1 and not isinstance(trainer.strategy, ModelParallelStrategy):
            saved = self.built.block_list.modules.state_dict()
            self._loaded = {name: x.clone() if isinstance(x, Tensor) else copy.deepcopy(x) for name, x in saved.items()}
            self.built.show(self.depths[0])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the list and the optimizers, and let both grow to the depth of a training that is resumed."""
        if self._find(pl_module, trainer) is not self.built:
            raise ValueError(
                f"Stack: {self.name!r} was built a second time after setup; build it in __init__, setup or "
                f"configure_model"
            )
        if self._resumes:
            check_resumed("Stack", trainer)
        with errors_of("Stack"):
            check_optimizers(trainer.optimizers, self.built.block_list.blocks)
        growing = [stack.built.block_list.name for stack in stacks_of(trainer)]
        if others := [name for name in self.built.of_one_count if name not in growing]:
            rank_zero_warn(f"Stack: {one_count(self.name, others)}")
        lists = [stack.built.block_list.modules for stack in stacks_of(trainer)]
        for name, parts in pl_module.named_modules():
            is_beside = isinstance(parts, Blocks) and not any(parts is own for own in lists)
            same = is_beside and len(parts) >= self.built.most and [*parts][-self.built.most :]
            if same and all(map(is_copy, same, self.built.blocks)):
                rank_zero_warn(
                    f"Stack: {name!r} is a copy of {self.name!r} and does not grow along; name it in a Stack of its "
                    f"own, or make it of the grown network, in a second run"
                )
        self._begins &= not trainer._checkpoint_connector._loaded_checkpoint
        self.depths = self.depths or [self.built.depth]
        if self._loaded is not None:  # optimizers are made, and their states not yet loaded
            for depth in self.depths[1:]:
                self._grow_list(trainer, depth)
            self.built.block_list.modules.load_state_dict(self._loaded)
            self._loaded = None
            wrap_again(trainer)

    def _grow_list(self, trainer: Trainer, to: int) -> list[int]:
        """Grow the list to `to` blocks that the class has built, and return the indices of copies in it."""
        if isinstance(trainer.strategy, DDPStrategy) and trainer.strategy._layer_sync is not None:
            trainer.strategy._layer_sync.apply(nn.ModuleList(self.built.spare(to)))
        with isolate_rng(), errors_of("Stack"):
            torch.manual_seed(to)
            return self.built.grow(to, trainer.optimizers, **self.options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the depth, and begin the file of events."""
        if trainer.is_global_zero:
            begins = "begins" if self._begins else "goes on"
            print_status(f"Stack: {self.name} {begins} with {self.built.depth} of {self.built.most} blocks")
        if math.isinf(trainer.num_training_batches) and trainer.max_steps < 1 and not any(timers_of(trainer)):
            rank_zero_warn(
                f"Stack: the loader does not tell its length, so the share of the training is known between epochs "
                f"alone; give max_steps, or {self.name} may grow late or never"
            )
        self._log, self._began = open_events(trainer, STACK_FILE), time.perf_counter()
        stacks = stacks_of(trainer)
        if self._log is not None and self is stacks[0]:  # of several callbacks the first writes what all have in common
            self._log.discard_after(trainer.global_step)
            steps = int(min(trainer.estimated_stepping_batches, 2**53))  # infinite if a time ends the training
            unknown: dict[str, Any] = {"blueprints": [], "score": "", "flops": 0, "behind": {}}
            names = [stack.name for stack in stacks]
            started = Started(trainer.global_step, SCHEMA, hosts=1, horizon=steps, slots=names, **unknown)
            self._log.write([started])
            write_run_record(self._log.path.parent, trainer)

    # The training goes on, and grows between two steps.

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Grow to the number of blocks that the plan asks for, but only between two optimizer steps."""
        if self._steps == -1:
            self._first_batch(trainer, pl_module, batch, batch_idx)
        # False in the middle of gradient accumulation: growing would mix gradients of two depths.
        steps = trainer.global_step + self._own_steps
        between_steps, self._steps = steps != self._steps, steps
        depth, most = self.built.depth, self.built.most
        if depth < most:
            groups = chain.from_iterable(optimizer.param_groups for optimizer in trainer.optimizers)
            lr = max((float(group["lr"]) for group in groups if group["lr"] is not None), default=0.0)
            self.lr_peak = max(self.lr_peak, lr)
            share = round(share_of_training(trainer, batch_idx), DIGITS)
            if between_steps and share > 0.0:
                asked = self.plan(self._progress(trainer, share))
                if not isinstance(asked, Integral) or isinstance(asked, bool) or asked > most:
                    raise ValueError(
                        f"Stack: the plan asks for {asked!r} blocks of {self.name!r}, and the module builds {most}; "
                        f"return a whole number up to that"
                    )
                if asked > depth:
                    self._grow(trainer, int(asked), lr)
        stacks = stacks_of(trainer)
        if self is stacks[-1]:  # the lists of all callbacks have grown now
            depths = {stack.name: stack.built.depth for stack in stacks}
            flops = 0 if self.cost is None else self.cost.flops(depths) * trainer.world_size
            for stack in stacks:
                stack.batches += 1
                stack.flops_spent += flops

    def _first_batch(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Check the weights and the plan, and let the first `Stack` measure what a batch costs."""
        self._end_loading()
        for optimizer in hooked_optimizers(*trainer.optimizers):
            self._handles.append(optimizer.register_step_post_hook(partial(self._count_step, trainer)))
        with errors_of("Stack"):
            self.built.check_present()
        left = LEFT.get(self.built.block_list.modules)
        goes_on = left is not None and len(left) > 0 and torch.equal(left, learning_weight(self.built.blocks[0]))
        trained = self._was_loaded or goes_on or any(map(is_trained, self.built.blocks))
        if self._begins and self._given_start is None and trained:
            for blocks in self._lists:
                blocks.show(blocks.most)
            raise ValueError(
                f"Stack: the {self.built.most} blocks of {self.name!r} hold trained weights, and all but the first "
                f"{self.start} would be lost; give start={self.start} if that is meant, or train without Stack"
            )
        if self.built.depth < self.built.most:
            self._warn_of_kept_parts(trainer)
        self._log_blocks(trainer)
        leader, *others = stacks_of(trainer)
        depths = {stack.name: range(stack.built.depth, stack.built.most + 1) for stack in (leader, *others)}
        if self is not leader:
            self.cost = leader.cost
        elif self.cost is None or self.cost.per_block.keys() != depths.keys():
            try:
                cost = measure_batch(trainer, module, depths, batch=batch, batch_idx=batch_idx)
            except COUNT_ERRORS as error:
                cost, reason = None, " ".join(str(error).split())
                rank_zero_warn(
                    f"Stack: the FLOPs of a training step are not known, because it does not run on a copy of the "
                    f"module ({type(error).__name__}: {reason:.200}); the training goes on without them"
                )
            self.cost = trainer.strategy.broadcast(cost)  # batches of processes may differ in length
        if getattr(self.plan, "needs_targets", False) and not (self.cost and self.cost.targets):
            raise ValueError(
                "Stack: the plan needs the number of targets of a batch, which torch's cross-entropy, MSE, Huber and "
                "binary losses tell, in a training_step that runs on a copy of the module; give at, or a plan of your "
                "own"
            )

    def _warn_of_kept_parts(self, trainer: Trainer) -> None:
        """Warn of containers beside the list, in the module or a callback, with parts of as many blocks as it has now,
        such as parameters that are clipped, or of all that the class has built."""
        blocks, depth = self.built.blocks[self.built.block_list.skip_first : self.built.end], self.built.depth
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        containers = kept_elsewhere(self.built.block_list, blocks, trainer.optimizers, others=callbacks)
        for name, of_blocks in containers:
            if all(of_blocks):
                rank_zero_warn(
                    f"Stack: {name!r} holds parts of all {self.built.most} blocks of {self.name!r}, of which {depth} "
                    f"run now; read them from the list where they are used"
                )
            elif all(of_blocks[:depth]):
                rank_zero_warn(
                    f"Stack: {name!r} holds parts of the blocks that {self.name!r} has now, and not of later ones; "
                    f"read them from the list where they are used"
                )

    def _count_step(self, trainer: Trainer, *_: object) -> None:
        """Count a step; after the first ones, while there are gradients, look for parts that do not grow along."""
        # More than one step: behind a head that begins as zeros the gradients of the first are zero.
        looks = self.built.depth < self.built.most and self._own_steps < IDLE_STEPS * len(trainer.optimizers)
        if looks and not self._warned_of_idle:
            self._warned_of_idle = self._warn_of_idle_parts(trainer)
        self._own_steps += 1

    def _progress(self, trainer: Trainer, share: float) -> Progress:
        """Return the progress by which the plan decides, when `share` of the training is over."""
        if not self._parameters:
            depths = range(min(self.start, self.depths[0]), self.built.most + 1)
            self._parameters = self.built.count_parameters(depths)
        done = trainer.fit_loop.epoch_loop.total_batch_idx
        if share != self._share:  # with a loader of unknown length the share changes between epochs alone
            self._share, self._batches_at_share = share, done
        targets_left = None
        if self.cost is not None and self.cost.targets:
            batches_left = self._batches_at_share / share - done
            targets_left = max(0.0, batches_left) * self.cost.targets * trainer.world_size
        return Progress(
            share=share,
            depth=self.built.depth,
            first=self.start,
            most=self.built.most,
            parameters=self._parameters,
            targets_left=targets_left,
            flops_spent=self.flops_spent,
            metrics=self._metrics,
        )

    def _log_blocks(self, trainer: Trainer) -> None:
        """Write the number of blocks. Only at changes: `LightningModule.log` would take half a millisecond a batch."""
        for logger in trainer.loggers:
            logger.log_metrics({f"stack/{self.name}": float(self.built.depth)}, step=trainer.global_step)

    def _grow(self, trainer: Trainer, to: int, lr: float) -> None:
        """Grow the network and its averages to `to` blocks, and report it; `lr` is the present learning rate."""
        before, parameters = self.built.depth, count_parameters(trainer.lightning_module)
        self._warn_of_copies(trainer)
        self._log_blocks(trainer)
        copies = self._grow_list(trainer, to)
        self._log_blocks(trainer)
        wrap_again(trainer)
        warn_without_gradients(self.built.block_list, [self.built.blocks[i] for i in copies], trainer.optimizers)
        for average in self._lists[1:]:
            average.grow(to, (), order=self.options["order"], new="copy", state="copy")
            for i in copies if self.options["new"] != "copy" else ():  # an average of other content begins with it
                average.blocks[i].load_state_dict(self.built.blocks[i].state_dict())
        self.depths.append(to)
        for stack in stacks_of(trainer):
            stack._parameters = {}  # those of the module have changed for each list
        if self._log is not None:
            event = Stacked(trainer.global_step, self.name, before=before, after=to, parameters=parameters)
            self._log.write([event])
        self._change_line = f"Stack, step {trainer.global_step}: {self.name} {before} → {to}, training loss "
        self._change_line += self._last_loss(trainer)
        if lr < 0.99 * self.lr_peak:
            rank_zero_warn(
                f"Stack: the learning rate has fallen from {self.lr_peak:.3g} to {lr:.3g} before {self.name} grows; "
                f"grow earlier, or keep the rate constant until then"
            )

    def _warn_of_copies(self, trainer: Trainer) -> None:
        """Warn, at the first change, of copies of the network that other callbacks hold, such as averages."""
        own, first = self.built.block_list.modules, self.built.blocks[0]
        growing = (trainer.lightning_module, *averages_of(trainer))
        known = {part for network in growing for part in network.modules()}
        for callback in trainer.callbacks if len(self.depths) == 1 else ():  # type: ignore[attr-defined]
            held = [value for value in vars(callback).values() if isinstance(value, nn.Module)]
            for part in (part for module in held for part in module.modules() if isinstance(part, Blocks)):
                if part not in known and len(part) == len(own) and type(part[0]) is type(first):
                    rank_zero_warn(
                        f"Stack: {type(callback).__name__} holds a copy of {self.name!r}, which does not grow along; "
                        f"if it averages, use EMAWeightAveraging, or average in a second run"
                    )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._loss = loss.detach() if isinstance(loss, Tensor) else None
        if self._change_line is not None:
            if trainer.is_global_zero:
                print_status(f"{self._change_line} → {self._last_loss(trainer)}")
            self._change_line = None

    def _warn_of_idle_parts(self, trainer: Trainer) -> bool:
        """Warn of parts beside the blocks, such as norms or scales, of which as many learn as there are blocks."""
        growing = {part for stack in stacks_of(trainer) for part in stack.built.block_list.modules.modules()}
        depth, most = self.built.depth, self.built.most
        learning: list[tuple[str, list[bool]]] = []  # whether each part has a gradient
        for name, module in trainer.lightning_module.named_modules():
            if module in growing:
                continue
            if isinstance(module, Blocks | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
                parts = [[*part.parameters()] for part in module.children()] or [[x] for x in module.parameters()]
                if len({type(part) for part in module.children()}) < 2:
                    learning.append((name, [any(x.grad is not None for x in part) for part in parts]))
            for key, x in module.named_parameters(name, recurse=False):
                axes = [axis for axis, size in enumerate(x.shape[:2]) if size == most or x.shape == (most + 1,)]
                for axis in axes if x.grad is not None else ():
                    grad = x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
                    entries = grad.to_dense().ne(0).movedim(axis, 0).reshape(x.shape[axis], -1).any(1).tolist()
                    learning += [(key, entries[:most]), (key, entries[-most:])]  # one more is for input or output
        # Of as many parts as blocks, or of several for each block.
        counts = {
            name: (sum(of_parts), len(of_parts))
            for name, of_parts in learning
            if of_parts
            and len(of_parts) % most == 0
            and of_parts == [i * most < depth * len(of_parts) for i in range(len(of_parts))]
        }
        for name, (some, every) in counts.items():
            rank_zero_warn(
                f"Stack: of {name!r} the first {some} of {every} parts have a gradient, as {depth} of {most} blocks of "
                f"{self.name!r} run; name a list in a Stack of its own, and keep all else in the blocks, or later "
                f"parts begin untrained beside copies of trained blocks"
            )
        return bool(counts)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_validation_of_fit(trainer):
            return
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._metrics = trainer.strategy.broadcast(logged)  # a plan must decide alike in all processes
        if self._log is not None and self is stacks_of(trainer)[0]:
            step, size, flops = trainer.global_step, count_parameters(pl_module), float(self.flops_spent)
            seconds = time.perf_counter() - self._began
            self._log.write([Validated(step, step, size, flops=flops, seconds=seconds, metrics=dict(self._metrics))])

    def _last_loss(self, trainer: Trainer) -> str:
        """Return the loss of the last batch as text."""
        if self._loss is None:
            return "unknown"
        # Lightning has divided it by the number of batches whose gradients are accumulated.
        accumulated = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
        return f"{float(self._loss.float().mean()) * accumulated:.3f}"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print how deep the network is, what it has cost, and which trainings of fixed depth cost as much."""
        self._log_blocks(trainer)
        if not isinstance(trainer.strategy, ModelParallelStrategy):
            LEFT[self.built.block_list.modules] = learning_weight(self.built.blocks[0])
        if not trainer.is_global_zero:
            return
        line = f"Stack: {self.name} has {self.built.depth} of {self.built.most} blocks"
        if self.built.depth < self.built.most:
            reason = getattr(self.plan, "reason", "the plan did not ask for more")
            line += f", as {reason}; build the class with {self.built.depth} to load the last checkpoint"
        if self is stacks_of(trainer)[0] and self.cost is not None and self.flops_spent:
            line += self._cost_report(trainer, pl_module, self.cost)
        print_status(line)

    def _cost_report(self, trainer: Trainer, module: LightningModule, cost: BatchCost) -> str:
        """Return as text what the training has cost, and how long trainings of fixed depth are that cost as much."""
        all_batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        steps = round(trainer.global_step * self.batches / all_batches)  # training may have begun without this callback
        # What max_steps counts: batches, or steps of several ones.
        count, unit = self.batches, "training batches"
        if module.automatic_optimization and 0 < steps < self.batches:
            count, unit = steps, f"steps of {self.batches / steps:.3g} batches"
        report = f"; {count:,} {unit} cost {self.flops_spent:.3g} FLOPs"
        stacks = stacks_of(trainer)
        last_depths = {stack.name: stack.depths[-1] for stack in stacks}
        first_depths = {stack.name: stack.depths[0] for stack in stacks}
        has_grown = last_depths != first_depths
        if has_grown:
            budget = self.flops_spent / trainer.world_size * count / self.batches
            lengths = [
                f"{int(budget / cost.flops(depths)):,} at {' + '.join(map(str, depths.values()))}"
                for depths in (last_depths, first_depths)
            ]
            report += f", those of {' or '.join(lengths)} blocks throughout"
        if cost.targets:
            targets = self.batches * trainer.world_size * cost.targets / count_parameters(module)
            report += f", {targets:.2g} targets per parameter"
        return report + "; compare with such trainings, without Stack" * has_grown


class LoadHook:
    """Hook on a list of blocks, which gives it as many blocks as the state that is about to be loaded into it has.

    If the module itself loads the state, before the first batch, the list has its present number of blocks again
    afterwards. In a copy of the network, or a file of it, the hook has no callback and does nothing.
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
        """Give the list `modules` as many blocks as a state dict has whose keys begin with `prefix`."""
        self.depth_before: int | None = None
        if self.callback is None:
            return
        trainer = self.callback._loading
        restores = trainer is not None and trainer._checkpoint_connector._loaded_checkpoint
        self.callback._was_loaded |= not restores
        if trainer is not None and restores:
            self.callback._resumes |= not ends_trial(trainer)
        for built in self._lists_of(modules) if trainer is not None else ():
            present, depth = built.depth, depth_in_state(built.block_list, state_dict, prefix)
            if depth != present and 0 < depth <= built.most:
                built.show(depth)
                self.depth_before = None if restores else present

    def after(self, modules: Any, *_: object) -> None:
        if self.callback is not None and self.depth_before is not None:
            for built in self._lists_of(modules):
                built.show(self.depth_before)

    def _lists_of(self, modules: Any) -> list[BuiltBlocks]:
        return [built for built in self.callback._lists if built.block_list.modules is modules] if self.callback else []


def stacks_of(trainer: Trainer) -> list[Stack]:
    """Return the callbacks that grow lists of blocks."""
    return [callback for callback in trainer.callbacks if isinstance(callback, Stack)]  # type: ignore[attr-defined]


def is_trained(block: nn.Module) -> bool:
    """Return True if the scale of a normalisation has learned: a class builds it of equal numbers."""
    # Not `module.weight`: reading it would run a parametrization, and that of `spectral_norm` changes by it.
    weights = [module._parameters.get("weight") for module in block.modules()]
    scales = [weight for weight in weights if isinstance(weight, Tensor) and weight.ndim == 1 and len(weight)]
    return any(bool((scale != scale[0]).any()) for scale in scales)


def learning_weight(block: nn.Module) -> Tensor:
    """Return the first numbers, on the CPU, of the first parameter of a block that learns; empty if none does."""
    learning = (parameter for parameter in block.parameters() if parameter.requires_grad)
    return next(learning, torch.empty(0)).detach().flatten()[:1000].cpu().clone()


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
