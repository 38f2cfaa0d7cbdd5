"""Callback that grows the network of a LightningModule while its Trainer trains it."""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from esper_lightning.callbacks.checks import (
    after_setup,
    check_processes,
    check_resumed,
    check_trainer,
    ends_trial,
    is_copy,
    is_validation_of_fit,
)
from esper_lightning.callbacks.measuring import VariantMeter, first_rows, mean_over_processes
from esper_lightning.callbacks.run_record import open_events, write_run_record
from esper_lightning.controllers import check_methods
from esper_lightning.controllers.learned import LearnedController, TrainingRules
from esper_lightning.controllers.rules import FossilizedSeed, StaticController
from esper_lightning.envs import Action, ActionConfig, EnvConfig
from esper_lightning.envs.env_factory import probe_action_space
from esper_lightning.envs.flops import PASSES_PER_STEP, measure_flops
from esper_lightning.envs.host_env import GrowthRecord
from esper_lightning.envs.host_pool import SinglePool
from esper_lightning.envs.measurements import POINTS_PER_UNIT, EpochResult, LossAndScore, TrainingStats, Validation
from esper_lightning.envs.observation import ObservationConfig
from esper_lightning.envs.rewards import ObjectiveConfig
from esper_lightning.evaluation.checkpoints import find_controller
from esper_lightning.growth import GrowingNetwork, SeedEvent, attach_from_state_dict, attach_slots, slots_of
from esper_lightning.growth.attach import attach_at, attached_places, check_new_slots, is_compiled
from esper_lightning.growth.blueprints import suggest_name
from esper_lightning.growth.counterfactual import ScoreFunction, judge_seeds
from esper_lightning.growth.depth import DepthSlot
from esper_lightning.growth.gates import GradientStats, LifecycleConfig
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.param_groups import (
    check_optimizer,
    follow,
    hooked_optimizers,
    host_groups,
    schedulers_in,
    seed_groups,
)
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.console import print_status
from esper_lightning.runtime.nested import call_network, copy_module, iter_tensors
from esper_lightning.tasks.task import LARGEST_SHARE
from esper_lightning.telemetry.events import EVENTS_FILE, SCHEMA, Contributed, Event, EventLog, Started, Validated

STATE_FORMAT = 6  # version of the callback's state in a checkpoint
PROBE_ROWS = 4  # samples on which each blueprint is tried once, before training; two at least, for BatchNorm

CHANCE_TICKS, CHANCE_RISE = 10, 0.01
"""Ticks after which a warning comes if a share has never risen by this, or a loss never fallen by this part of it."""

LARGEST_LOSS = 12.0
"""Largest loss before training of which exp(−loss), the score that deciders see, will show what training does to it."""

TINY = 1e-6  # least share of which a logarithm is taken, and least loss by which a difference is divided

FALLS = re.compile(
    r"(?<![a-z])(loss|err|error|perplexity|ppl|bp[bc]|nll|b?ce|entropy|r?mse|r?msle|s?mape|mae|huber|brier|[cew]er|ece)"
    r"(?![a-z0-9])",
    re.IGNORECASE,
)
"""Words in the names of metrics that are lower where a network is better."""

AVERAGES = "averages parameters by their place, which growth changes"
CONFLICTING_CALLBACKS = {
    WeightAveraging: AVERAGES,
    StochasticWeightAveraging: AVERAGES,
    BaseFinetuning: "rearranges the optimizer's parameter groups when a run is resumed",
}


class Decider(Protocol):
    """Chooses what grows, once per tick. If it has `state_dict` and `load_state_dict(pool, state)`, runs can resume."""

    def reset(self, pool: SinglePool) -> None:
        """Begin a training."""

    def act(self, pool: SinglePool) -> Action:
        """Return an action that is possible according to `pool.masks`."""
        ...


class Measured(NamedTuple):
    """Measurements of a validation, kept until the next training batch begins."""

    metric: float
    loss: float | None  # None: not monitored
    contributions: dict[str, float]  # points of each blended seed, by slot


class Grow(Callback):
    """Grows one network of a LightningModule while its own training goes on.

    After each validation a decider chooses one action: put a seed into a slot, make one permanent, remove one, or
    wait. The action is carried out before the next training batch, so that a checkpoint holds the network as it was
    validated. Until something grows the training is bit for bit what it is without this callback. The guide is
    docs/methods/seeds.md.

    Args:
        slots: Modules of the network behind which seeds may grow, as in `attach_slots`, named within the network or
            within the LightningModule. Empty: it has slots already.
        network: Name of the network in the LightningModule. None: its only child with parameters and these slots.
        blueprints: Kinds of seeds on offer, by name or import path. None: all of this package that fit the network.
        decider: `heuristic`, `climbing`, `periodic`, or the name or import path of your own; a schedule (`x.json`); a
            policy (`x.ckpt`, `x.safetensors` or `tamiyo`); `wait`, by which nothing grows; or a `Decider`.
        monitor: Name of the logged validation metric by which seeds are judged.
        mode: `max` for a share from 0 to 1, such as accuracy; `min` for a loss. None: `max`, and a metric that is named
            a loss or an error is refused.
        score: Function of outputs and targets that returns a number from 0 to 1 per sample, in place of `monitor`: the
            network is then measured by itself, with batches that are pairs of its input and the targets.
        loss: Name of the logged validation loss that deciders see. None: the monitored loss, or -ln of the metric.
        batches: Validation batches, kept in memory, on which each seed is compared with its absence: the first ones.
        every: Validations per tick; a decision follows each tick.
        horizon: Ticks of the whole training; afterwards nothing is decided. None: from the trainer's `max_epochs`.
        price: Share of the metric (0 to 1) that a growth by a factor of e must add to be worth it.
        lifecycle: When seeds change their stage. None: as in the training of a trained policy, else the defaults.
        actions: Further choices of the decider, such as the durations of blending. None: as for `lifecycle`.
        seed_options: Options of the optimizer for seeds, such as `lr`; all others are those of its first group.
        rng_seed: RNG seed of the seeds' weights.
    """

    def __init__(
        self,
        slots: Sequence[str] = (),
        *,
        network: str | None = None,
        blueprints: str | list[str] | None = None,
        decider: str | Decider = "heuristic",
        monitor: str = "val_acc",
        mode: Literal["max", "min"] | None = None,
        score: ScoreFunction | None = None,
        loss: str | None = None,
        batches: int = 8,
        every: int = 1,
        horizon: int | None = None,
        price: float = ObjectiveConfig.price,
        lifecycle: LifecycleConfig | None = None,
        actions: ActionConfig | None = None,
        seed_options: dict[str, float] | None = None,
        rng_seed: int = 0,
    ) -> None:
        for name, number in (("batches", batches), ("every", every), ("horizon", horizon)):
            if number is not None and number < 1:
                raise ValueError(f"Grow: {name} must be at least 1, got {number}")
        if score is not None and mode == "min":
            raise ValueError("Grow: a score grows with quality; leave mode at 'max'")
        if score is None and mode is None and FALLS.search(monitor):
            raise ValueError(f"Grow: by its name {monitor} falls with quality; give mode='min', or 'max' if it rises")
        if decider in ("scaling", "tamiyo_depth"):
            raise ValueError(f"Grow: {decider} decides about depth; use the callback Stack with plan={decider!r}")
        self.decider: Any = make_decider(decider)
        self.decider_name = decider if isinstance(decider, str) else type(decider).__name__
        rules = getattr(self.decider, "rules", None) or TrainingRules(LifecycleConfig(), ActionConfig())
        self.lifecycle: LifecycleConfig = lifecycle or rules.lifecycle
        self.actions: ActionConfig = actions or rules.actions
        if blueprints is not None:
            if self.actions.blueprints is not None:
                raise ValueError("Grow: blueprints are named twice; leave actions.blueprints out")
            named = [blueprints] if isinstance(blueprints, str) else blueprints
            self.actions = replace(self.actions, blueprints=named or None)
        self.slot_names = [slots] if isinstance(slots, str) else list(slots)
        self.network_name = network
        self.monitor, self.mode, self.score, self.loss = monitor, mode or "max", score, loss
        self.num_batches, self.every, self.horizon = batches, every, horizon
        self.objective = ObjectiveConfig(price=price)
        self._config(horizon=1)  # raises ValueError now if settings contradict each other
        self.seed_options = {name: float(value) for name, value in (seed_options or {}).items()}
        self.rng_seed = rng_seed
        self._log: EventLog | None = None
        self._handles: list[RemovableHandle] = []  # of hooks on the optimizer
        self.network: nn.Module = nn.Identity()
        """The network that grows; a stand-in before `setup` finds it."""
        self._forget()

    def _forget(self) -> None:
        """Reset all that belongs to one training."""
        self.pool: SinglePool | None = None
        """The network as deciders see it; None before training."""
        self.validations = 0
        self._restored: dict[str, Any] | None = None
        """State of the checkpoint whose weights the network has, empty if it holds none; None once training begins."""
        self._contributions: dict[str, float] = {}
        self._with_all: float | None = None  # the metric with all seeds, if it was measured before the validation
        self._logged_before: dict[str, Tensor] = {}  # metrics that were logged before the present validation
        self._pending: Measured | None = None
        self._gradients: Tensor | None = None  # [1 + K, 4]: statistics of the host, then of the seed in each slot
        self._train_loss: Tensor | float = 0.0  # sum over batches since the last tick
        self._train_batches = 0
        self._plateau_due = False  # True: schedulers on a plateau have not been stepped since the validation
        self.batches_seen, self.flops_spent = 0, 0
        """Training batches so far, and their cost: the sum of the FLOPs of a forward pass for one sample, by batch."""

    def _config(self, horizon: int) -> EnvConfig:
        """Return the settings that deciders see, for a training of `horizon` ticks."""
        trained = self.decider.observation if isinstance(self.decider, LearnedController) else None
        return EnvConfig(
            horizon=horizon,
            lifecycle=self.lifecycle,
            actions=self.actions,
            objective=self.objective,
            observation=trained or ObservationConfig(),
        )

    @property
    def _pool(self) -> SinglePool:
        assert self.pool is not None, "training has begun"
        return self.pool

    @property
    def growing(self) -> GrowingNetwork:
        """The network with its optimizer and measurements, once training has begun."""
        return self._pool.env.growing

    @property
    def controls(self) -> dict[str, str | Decider]:
        """Deciders of the trainings with which growth is to be compared, by name, once training is over.

        `ungrown`: nothing grows, by `wait`. `built in`, if something has grown: the seeds that are in the network now
        are in it from the first batch on, with fresh weights.
        """
        seeds = tuple(FossilizedSeed(slot.name, str(slot.blueprint)) for slot in self._blended)
        return {"ungrown": "wait"} | ({"built in": StaticController([seeds])} if seeds else {})

    @property
    def affordable_batches(self) -> dict[str, int]:
        """Number of training batches, by control, with which that control costs the FLOPs of this training so far."""
        networks = {"ungrown": [], "built in": self._blended}
        flops = {name: self._pool.env.flops.with_seeds(seeds) for name, seeds in networks.items()}
        # 0 for a network of operators that torch does not count
        return {name: round(self.flops_spent / max(1, count)) for name, count in flops.items()}

    @property
    def _blended(self) -> list[SeedSlot]:
        return [slot for slot in self._pool.env.slots if slot.blended]

    # The network is found, and takes the slots of a checkpoint before its weights are loaded.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.teardown(trainer, pl_module, stage)  # an earlier run may have failed
        if stage == "fit":  # before callbacks that conflict begin; once more when the networks are built
            check_trainer("Grow", trainer, pl_module, conflicting=CONFLICTING_CALLBACKS)
        after_setup(trainer, pl_module, lambda: self._find(trainer, pl_module, stage))

    def _find(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the network, check it, and let it take the slots of a checkpoint."""
        self.network_name, network = find_network(pl_module, self.network_name, self.slot_names)
        self.slot_names = names_within(network, self.network_name, self.slot_names)
        if network is not self.network:
            self._forget()
        self.network, self._resumes = network, False
        self._slots_of_this_run = frozenset([*slots_of(network), *self.slot_names])
        on_load_checkpoint = pl_module.on_load_checkpoint

        def attach_and_load(checkpoint: dict[str, Any]) -> None:
            # Slots are attached here, because callbacks are restored after the module, whose weights must fit.
            if not ends_trial(trainer):  # in which nothing grows
                self._restored, self._resumes = checkpoint.get("callbacks", {}).get(self.state_key, {}), True
                attach_at(network, (self._restored or {}).get("attached", []))
                attach_from_state_dict(network, checkpoint["state_dict"], prefix=f"{self.network_name}.")
            on_load_checkpoint(checkpoint)

        vars(pl_module)["on_load_checkpoint"] = attach_and_load
        if stage == "fit":
            self._check(trainer, pl_module)
            vars(pl_module)["clip_gradients"] = separate_clipping(pl_module.clip_gradients, trainer)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise ValueError if this network cannot grow in this training."""
        check_processes("Grow", trainer)
        check_trainer("Grow", trainer, module, conflicting=CONFLICTING_CALLBACKS)
        parts = {"": module, **{f"{self.network_name}.{name}": part for name, part in self.network.named_modules()}}
        for name, part in parts.items():
            if is_compiled(part) or module._compiler_ctx is not None:
                raise ValueError(
                    f"Grow: {name.rstrip('.') or type(module).__name__} is compiled, which hides its parts; compile "
                    f"training_step, or a function that calls the network"
                )
        for name, slot in (present := slots_of(self.network)).items():
            if isinstance(slot, DepthSlot):
                raise ValueError(
                    f"Grow: {name!r} is for depth, which the callback Stack grows; build the network without it"
                )
        if missing := [name for name in self.slot_names if name not in present]:
            try:
                check_new_slots(self.network, missing)
            except ValueError as error:
                raise ValueError(f"Grow: in {self.network_name!r}, {error}") from error
        for name, part in module.named_modules():
            if is_copy(part, self.network):
                rank_zero_warn(
                    f"Grow: {name!r} is a copy of {self.network_name!r} and gets no seeds; make it of the grown "
                    f"network, in a second run"
                )
        if not trainer.enable_validation:
            raise ValueError(
                "Grow: each validation is followed by a decision, and this run has none; define validation_step and "
                "val_dataloader, and leave limit_val_batches above 0"
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for name in ("on_load_checkpoint", "clip_gradients"):  # the module's own methods are in force again
            vars(pl_module).pop(name, None)
        vars(self).pop("_meter", None)  # releases its batches
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._log is not None:
            self._log.close()
            self._log = None

    # Training begins.

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the optimizer, and give the seeds of a network that has some their parameter groups in it."""
        self.optimizer = find_optimizer(trainer, self.network, str(self.network_name))
        self._growing: GrowingNetwork | None = None
        if self._resumes:
            check_resumed("Grow", trainer)
        slots = slots_of(self.network)
        if self._resumes and not self._restored and any(slot.occupied for slot in slots.values()):
            raise ValueError(
                "Grow: the checkpoint holds a grown network, and no state of Grow by which growth goes on; resume one "
                "that was saved with Grow, or load the weights (attach_from_state_dict) and begin a new training"
            )
        if slots:
            # By now, because Lightning restores optimizer and schedulers after this hook.
            self._growing = self._hold_seeds(trainer)
            wrap_without_seeds(trainer, (slot.seed for slot in slots.values()))

    def _hold_seeds(self, trainer: Trainer) -> GrowingNetwork:
        """Return the network with its optimizer, in which each seed has a parameter group that schedulers follow."""
        device = next(iter(slots_of(self.network).values())).alpha.device
        host = host_groups(self.optimizer)[0]
        host.setdefault("initial_lr", host["lr"])  # a rate that is set by hand has no scheduler that remembers it
        growing = GrowingNetwork(
            self.network,
            self.optimizer,
            horizon=1,  # until the number of batches is known, when training begins
            lifecycle=self.lifecycle,
            seed_options=self.seed_options,
            generator=torch.Generator(device).manual_seed(self.rng_seed),
        )
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        for value in vars(trainer.lightning_module).values():  # a module may step one of which Lightning does not know
            if isinstance(value, LRScheduler) and not any(value is known for known in schedulers_in(*schedulers)):
                schedulers.append(value)
        for scheduler in schedulers:
            if scheduler.optimizer == self.optimizer:
                follow(scheduler, growing)
        return growing

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the pool that the decider sees, and begin to grow the network or go on with it."""
        state = (self._restored or {}) if self._resumes else {}
        # A run of this callback that goes on counts from its own beginning; epochs before it are over.
        epochs_over = 0 if state else trainer.current_epoch
        horizon = self.horizon or count_ticks(trainer, self.every, epochs_over=epochs_over)
        precision = trainer.precision_plugin
        self._has_loss_scale = isinstance(precision, MixedPrecision) and precision.scaler is not None
        is_manual = not pl_module.automatic_optimization
        # A training batch may end without an optimizer step, so that the last one before a validation may.
        self._may_skip_steps = self._has_loss_scale or is_manual or trainer.accumulate_grad_batches > 1
        for optimizer in hooked_optimizers(self.optimizer) if is_manual else ():
            self._handles.append(optimizer.register_step_post_hook(self._measure_first_step))
        self._meter = VariantMeter(
            trainer,
            pl_module,
            self.network,
            monitor=self.monitor,
            is_share=self.mode == "max",
            score=self.score,
            count=self.num_batches,
        )
        if state:
            self._check_state(state)
        self.pool = pool = self._make_pool(trainer, state, horizon)
        events: list[SeedEvent] = []
        if state:
            self._continue(trainer, state)
        else:  # the network is measured before its first epoch, and the first decision carried out
            variants = [frozenset(slot.name for slot in self._blended)]
            (metric,) = self._meter.measure(variants)
            loss = None if self.loss is None else self._meter.measure(variants, self.loss)[0]
            if self.mode == "min" and math.isfinite(metric) and not 0.0 <= metric <= LARGEST_LOSS:
                rank_zero_warn(
                    f"Grow: {self.monitor} is {metric:.4g} before training, and deciders see exp(−loss), which hardly "
                    f"tells losses below 0 or above {LARGEST_LOSS:g} apart; monitor the loss divided by a constant, or "
                    f"a share with mode 'max'"
                )
            pool.begin(self._validation(metric, loss))
            self.decider.reset(pool)
            events = self._decide(trainer)
        tick, flops, space = pool.env.tick, pool.env.flops, pool.space
        self._log = open_events(trainer, EVENTS_FILE)
        if self._log is not None:
            if state:
                self._log.discard_after(tick)
            layout: dict[str, Any] = {"slots": space.slot, "blueprints": space.blueprint, "behind": flops.behind}
            started = Started(tick, SCHEMA, hosts=1, horizon=horizon, score=self.monitor, flops=flops.host, **layout)
            self._log.write([started])
            self._began = time.perf_counter()
            write_run_record(self._log.path.parent, trainer)
        self._step_flops = flops.with_seeds(pool.env.slots)
        self._report(trainer, events, None)

    def _make_pool(self, trainer: Trainer, state: Mapping[str, Any], horizon: int) -> SinglePool:
        """Attach missing slots and return the network as deciders see it; `state` of a checkpoint, or empty."""
        example = self._meter.example_input(str(self.network_name))
        rows, self._row = first_rows(example, PROBE_ROWS), first_rows(example, 1)

        def loss_of(network: nn.Module) -> Tensor:
            outputs = [x for x in iter_tensors(call_network(network, rows)) if x.is_floating_point()]
            return torch.stack([(x.float() - 1.0).square().mean() for x in outputs]).sum()

        with isolate_rng(), trainer.precision_plugin.tensor_init_context():
            missing = [name for name in self.slot_names if name not in slots_of(self.network)]
            if missing:
                attach_slots(self.network, missing, example)
            trial = self._without_seeds()
            config = self._config(horizon)
            flops = measure_flops(trial, self._row)
            if state:
                space = self.actions.make_space(state["slots"], state["blueprints"])
                growable = torch.tensor(state["growable"])
            else:
                space, growable = probe_action_space(trial, loss_of, actions=self.actions, birth=self.lifecycle.birth)
        growing = self._growing or self._hold_seeds(trainer)
        growing.horizon = horizon
        self._forget()
        env = GrowthRecord(growing, space, actions=self.actions, objective=self.objective, flops=flops)
        return SinglePool(env, trainer.strategy.broadcast(growable), config)

    def _without_seeds(self) -> nn.Module:
        """Return a copy of the network whose slots are empty."""
        host = copy_module(self.network)
        for slot in slots_of(host).values():
            slot.empty()
        return host

    def _follow_host(self) -> None:
        """Update the host's parameters and FLOPs if the callback `Stack` has grown it in depth."""
        env = self._pool.env
        parameters = count_parameters(self.network) - sum(slot.size for slot in env.slots)
        if parameters != env.host_parameters:
            env.host_parameters = parameters
            with isolate_rng():
                env.flops = measure_flops(self._without_seeds(), self._row)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the state of a checkpoint has another format, other slots or other blueprints."""
        if state["format"] != STATE_FORMAT:
            raise ValueError(
                f"Grow: the checkpoint is of format {state['format']}, this version reads {STATE_FORMAT}; continue it "
                f"with the version that wrote it, or train anew"
            )
        slots = [name for name in slots_of(self.network) if name in self._slots_of_this_run]
        slots += [name for name in self.slot_names if name not in slots]
        for name, value in {"slots": slots, "blueprints": self.actions.blueprints or state["blueprints"]}.items():
            if state[name] != value:
                raise ValueError(
                    f"Grow: {name} are {value!r} in this run and {state[name]!r} in the checkpoint; give the run the "
                    f"same"
                )

    def _continue(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Restore growth, decider and running sums from the state of a checkpoint, after network and optimizer."""
        pool = self._pool
        # `max_epochs` may have changed since the checkpoint. Nothing in the record depends on it.
        pool.env.load_record_state(state["record"])
        self.growing.load_measurement_state(state)
        pool.update()
        name, saved = state["decider"]["name"], state["decider"]["state"]
        if name != self.decider_name:
            raise ValueError(
                f"Grow: the checkpoint is of decider: {name}, the run of decider: {self.decider_name}; give the same"
            )
        if saved is None:
            raise ValueError(f"Grow: {name} cannot continue a run; give it state_dict and load_state_dict(pool, state)")
        self.decider.load_state_dict(pool, saved)
        self.validations = state["validations"]
        if state["pending"] is not None:
            self._pending = Measured(*state["pending"])
        self._gradients = state["gradients"]
        self._train_loss, self._train_batches = state["train_loss"], state["train_batches"]
        self.batches_seen, self.flops_spent = state["batches_seen"], state["flops_spent"]
        # Lightning steps these schedulers after the hooks that save checkpoints, and not again in a resumed run.
        for config, value in zip(trainer.lr_scheduler_configs, state["plateaus"], strict=False):
            if value is not None:
                config.scheduler.step(value)

    # One tick: a validation is measured, and followed by a decision before the next training batch.

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the contribution of each blended seed, on the first batches of the validation that begins."""
        if not is_validation_of_fit(trainer):
            return
        self.validations += 1
        self._contributions, self._with_all = {}, None
        self._logged_before = dict(trainer.callback_metrics)
        if self.validations % self.every != 0:
            return
        slots = self._pool.env.slots
        judged, variants = judge_seeds(slots)
        if trainer.world_size > 1:  # seeds have the running statistics and other buffers of the first process
            for slot in slots:
                for buffer in slot.seed.buffers():
                    torch.distributed.broadcast(buffer, src=0)
        if judged or self._meter.needs_proof:
            self._with_all, *without_each = self._meter.measure(variants)
            self._contributions = {
                slot: points_between(self._with_all, without, self.mode)
                for slot, without in zip(judged, without_each, strict=True)
            }

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_validation_of_fit(trainer):
            slots = self._pool.env.slots
            metrics = {
                "growth/parameters": float(count_parameters(self.growing.module)),
                "growth/seeds": float(sum(slot.occupied for slot in slots)),
                "growth/fossilized": float(sum(slot.stage is Stage.FOSSILIZED for slot in slots)),
                **{f"growth/alpha.{slot.name}": float(slot.alpha_now) for slot in slots if slot.blended},
                **{f"growth/contribution.{name}": points for name, points in self._contributions.items()},
            }
            pl_module.log_dict(metrics, sync_dist=trainer.world_size > 1, batch_size=1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the metric and the loss of the validation for the decision before the next training batch."""
        if not is_validation_of_fit(trainer):
            return
        self._plateau_due = trainer.is_last_batch
        if self.validations % self.every == 0:
            if self.score is None:
                metric = self._logged(trainer, self.monitor)
                self._meter.compare(self._with_all, metric)
            else:
                (metric,) = self._meter.measure([frozenset(slot.name for slot in self._blended)])
            loss = None if self.loss is None else self._logged(trainer, self.loss)
            self._pending = Measured(metric, loss, self._contributions)

    def _logged(self, trainer: Trainer, name: str) -> float:
        """Return a metric of the validation that has just ended, averaged over processes."""
        if name not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics))
            raise ValueError(f"Grow: no {name!r} was logged; log it in validation, or name one of: {logged}")
        if trainer.callback_metrics[name] is self._logged_before.get(name):
            raise ValueError(
                f"Grow: this validation has logged no {name!r}, an earlier one has; log it in each one, or set every= "
                f"to the number of validations from one to the next"
            )
        return mean_over_processes(trainer, trainer.callback_metrics[name])

    def _validation(self, metric: float, loss: float | None) -> Validation:
        """Return a validation as deciders see it: with a score from 0 to 1, and a loss, which may be made of it.

        A metric that is not finite has the score 0. Raises ValueError if a metric of mode `max` is no share.
        """
        score = 0.0
        if math.isfinite(metric):
            if self.mode == "max" and not 0.0 <= metric <= LARGEST_SHARE:
                raise ValueError(
                    f"Grow: {self.monitor} is {metric:.4g}, but in mode 'max' it must be a share from 0 to 1; scale "
                    f"it, or monitor a loss with mode 'min'"
                )
            score = math.exp(-max(metric, 0.0)) if self.mode == "min" else min(metric, 1.0)
        if loss is None:
            loss = metric if self.mode == "min" else -math.log(max(score, TINY))
        measured = LossAndScore(loss, score)
        return Validation(all_seeds=measured, without=[], fossilized=measured)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plateau_due = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """After a validation: record its tick, advance the seeds' stages, and carry out the next decision."""
        for slot in self._pool.env.slots:
            if slot.isolated and not slot.training:
                raise ValueError(
                    f"Grow: slot {slot.name!r} is in evaluation mode, in which no seed learns; put "
                    f"{self.network_name!r} into training mode (from_pretrained does not), and single layers into "
                    f"evaluation mode"
                )
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pool, growing = self._pool, self.growing
        self._follow_host()
        validation = self._validation(pending.metric, pending.loss)
        loss, score = validation.all_seeds
        if self._train_batches:
            loss = float(self._train_loss) / self._train_batches
        # Where no gradient has been seen, all have vanished.
        gradients = [GradientStats(norm=0.0, rms=0.0, vanished=1.0, exploded=0.0)] * (1 + len(growing.slots))
        if self._gradients is not None:
            gradients = [GradientStats(*row) for row in self._gradients.tolist()]
        host, *seeds = gradients
        numbers = {self.monitor: pending.metric, self.loss: pending.loss, "the training loss": loss}
        not_finite = [str(name) for name, number in numbers.items() if not math.isfinite(number or 0.0)]
        not_finite = trainer.strategy.broadcast(not_finite)  # each process has a training loss of its own
        if not_finite:
            rank_zero_warn(f"Grow: {' and '.join(not_finite)} is not finite; seeds stay as they are until it is")
            growing.lifecycle = replace(self.lifecycle, auto_cull=False)
        # The score on training data is unknown; deciders see the score of the validation instead.
        training = TrainingStats(loss, score, skipped_steps=0, host_gradient=host, seed_gradients=seeds)
        events = pool.record(EpochResult(training, validation), pending.contributions, hold_stages=bool(not_finite))
        growing.lifecycle = self.lifecycle
        scores = pool.env.history.score  # the first one is of before the training
        if pool.env.tick == CHANCE_TICKS and self._is_hardly_better(scores[0], max(scores)):
            rank_zero_warn(
                f"Grow: after {CHANCE_TICKS} ticks {self.monitor} is hardly better than before training; growth does "
                f"not help a network that does not learn: see to its data and learning rate first"
            )
        if pool.env.tick < pool.env.horizon and not not_finite:
            events += self._decide(trainer)
        self._step_flops = pool.env.flops.with_seeds(pool.env.slots)
        self._report(trainer, events, pending)
        self._gradients, self._train_loss, self._train_batches = None, 0.0, 0

    def _is_hardly_better(self, first: float, best: float) -> bool:
        """Return True if a share, or a loss whose exp(−loss) the scores are, has hardly changed; unknown is False."""
        if self.mode == "max":
            return best < first + CHANCE_RISE
        return first > 0.0 and math.log(best / first) < CHANCE_RISE * -math.log(first)

    def _decide(self, trainer: Trainer) -> list[SeedEvent]:
        """Carry out the decision of the first process in all of them."""
        action = self._pool.choose(self.decider) if trainer.is_global_zero else []
        return self._pool.apply(trainer.strategy.broadcast(action))

    # What happens in a training step.

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average the gradients of seeds over all processes: DistributedDataParallel knows the host alone."""
        # Also where gradients are accumulated: an average of sums is a sum of averages.
        seeds = [slot.seed for slot in self._pool.env.slots if slot.occupied and trainer.world_size > 1]
        learning = [parameter for seed in seeds for parameter in seed.parameters() if parameter.requires_grad]
        # All gradients of one dtype are joined, because Lightning waits for all processes before each reduction.
        for dtype in {parameter.dtype: None for parameter in learning}:
            parameters = [parameter for parameter in learning if parameter.dtype == dtype]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            joined = trainer.strategy.reduce(torch.cat([x.flatten() for x in gradients]), reduce_op="mean")
            for gradient, mean in zip(gradients, joined.split([x.numel() for x in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measure gradients, unscaled and unclipped, before a validation: Lightning releases them before it begins."""
        interval, loop = trainer.val_check_batch, trainer.fit_loop.epoch_loop
        batches = 1 + (loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx)
        # A step is expected after every `accumulate_grad_batches` batches, and after the last batch of an epoch. If
        # validations are due by the clock, one may follow every step.
        is_due = (trainer.is_last_batch or interval is None) or (
            not math.isinf(interval) and -batches % interval < trainer.accumulate_grad_batches
        )
        # The gradients of the first step are used if the last step overflows, or if a manual optimization skips it.
        is_due = is_due or (self._may_skip_steps and self._gradients is None)
        if is_due and optimizer is self.optimizer:
            measured = self.growing.gradient_stats_tensor()
            if self._gradients is not None and self._has_loss_scale:
                # The scaler skips a step whose gradients overflowed fp16.
                measured = torch.where(measured.isfinite().all(), measured, self._gradients.to(measured))
            self._gradients = measured

    def _measure_first_step(self, *_: object) -> None:
        """Measure gradients after a step of which Lightning does not know, as that of SAM's inner optimizer."""
        if self._gradients is None:
            self._gradients = self.growing.gradient_stats_tensor()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch and its FLOPs, and add its loss to the running sum."""
        self.batches_seen += 1
        self.flops_spent += self._step_flops
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # This runs after every batch, so operations without effect are left out.
            loss = loss.detach().float() if loss.ndim == 0 else loss.detach().float().mean()
            if pl_module.automatic_optimization and trainer.accumulate_grad_batches > 1:
                loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
            self._train_loss = self._train_loss + loss
            self._train_batches += 1

    # What is saved and shown.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of growth and of the decider that network, optimizer and schedulers do not hold."""
        if self._restored is not None:
            return self._restored
        if self.pool is None:
            return {}
        pool, decider = self.pool, self.decider
        return {
            "format": STATE_FORMAT,
            "slots": pool.space.slot,
            "attached": attached_places(self.network),
            "blueprints": pool.space.blueprint,
            "growable": pool.growable.tolist(),
            "record": pool.env.record_state(),
            **self.growing.measurement_state(),
            "decider": {
                "name": self.decider_name,
                "state": decider.state_dict() if hasattr(decider, "state_dict") else None,
            },
            "validations": self.validations,
            "pending": None if self._pending is None else list(self._pending),
            "gradients": None if self._gradients is None else self._gradients.cpu(),
            "train_loss": float(self._train_loss),
            "train_batches": self._train_batches,
            "batches_seen": self.batches_seen,
            "flops_spent": self.flops_spent,
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add to the callback's state, for each scheduler, the metric with which it is still to be stepped, or None."""
        if self._restored is None and self.state_key in checkpoint["callbacks"]:
            metrics = trainer.callback_metrics
            done = {"epoch": trainer.current_epoch, "step": trainer.fit_loop.epoch_loop.batch_idx}
            checkpoint["callbacks"][self.state_key]["plateaus"] = [
                float(metrics[config.monitor])
                if self._plateau_due
                and config.reduce_on_plateau
                and config.monitor in metrics
                and (done[config.interval] + 1) % config.frequency == 0
                else None
                for config in trainer.lr_scheduler_configs
            ]

    def _report(self, trainer: Trainer, changes: Sequence[SeedEvent], measured: Measured | None) -> None:
        """Print the changes of the present tick, and record them and the measurements, in the first process."""
        tick = self._pool.env.tick
        for change in changes if trainer.is_global_zero else ():
            worth = "" if change.contribution is None else f", worth {change.contribution:+.1f} points"
            # Reasons in a change speak of points, too, and those of a loss are percent of it.
            unit = "points" if self.mode == "max" else "% of the loss"
            print_status(f"Grow, tick {tick}: {change}{worth}".replace(" points", f" {unit}"))
        if self._log is not None:
            events: list[Event] = [change._replace(tick=tick) for change in changes]
            if measured is not None:
                events += self._measurements(trainer, tick, measured)
            self._log.write(events)

    def _measurements(self, trainer: Trainer, tick: int, measured: Measured) -> Iterator[Event]:
        """Yield the validation of a tick as an event, and the contributions if there are any."""
        metrics: dict[str, float | None] = {self.monitor: measured.metric}
        metrics |= {} if self.loss is None else {self.loss: measured.loss}
        size, flops = count_parameters(self.growing.module), PASSES_PER_STEP * self.flops_spent
        seconds = time.perf_counter() - self._began
        yield Validated(tick, trainer.global_step, size, flops=flops, seconds=seconds, metrics=metrics)
        if measured.contributions:
            slots = list(measured.contributions)
            yield Contributed(tick, [0] * len(slots), slots, points=list(measured.contributions.values()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the last validation, which no decision follows, and print what has grown and what it has cost."""
        if self._log is not None and self._pending is not None:
            self._log.write(self._measurements(trainer, self._pool.env.tick + 1, self._pending))
        if trainer.is_global_zero:
            self._follow_host()
            env = self._pool.env
            sizes = f"{count_parameters(self.growing.module):,} parameters, {env.host_parameters:,} of them"
            kept = sum(slot.stage is Stage.FOSSILIZED for slot in env.slots)
            seeds = f"seeds: {kept} kept, {sum(slot.live for slot in env.slots)} open"
            print_status(f"Grow: {self.network_name} has {sizes} without seeds; {seeds}")
            if self._blended and not isinstance(self.decider, StaticController):
                ungrown, built_in = self.affordable_batches.values()
                print_status(
                    f"Grow: {self.batches_seen:,} training batches cost the FLOPs of {built_in:,} with these seeds "
                    f"built in, and of {ungrown:,} without; compare with the deciders in Grow.controls"
                )


def make_decider(decider: str | Decider) -> Decider:
    """Return the decider with a name, an import path or a file; an object is returned as it is."""
    if isinstance(decider, str):
        return find_controller(decider, "Grow")
    check_methods(decider, "Grow: decider")
    return decider


def points_between(metric: float, reference: float, mode: str) -> float:
    """Return by how much a metric is better than a reference, in points; negative if it is worse.

    Mode "max": the difference · 100. Mode "min": the difference in percent of the reference's size. A metric that is
    not finite is worse by 100 than any that is.
    """
    if not (math.isfinite(metric) and math.isfinite(reference)):
        return POINTS_PER_UNIT * (math.isfinite(metric) - math.isfinite(reference))
    if mode == "max":
        return POINTS_PER_UNIT * (metric - reference)
    return POINTS_PER_UNIT * (reference - metric) / max(abs(reference), TINY)


def separate_clipping(clip: Callable[..., None], trainer: Trainer) -> Callable[..., None]:
    """Return a `clip_gradients` that clips the host, then each seed: one common norm would let a seed slow the host."""

    def clip_gradients(optimizer: Any, gradient_clip_val: float | None = None, *args: Any, **kwargs: Any) -> None:
        raw = getattr(optimizer, "optimizer", optimizer)  # a LightningOptimizer in manual optimization
        groups = list(raw.param_groups)
        is_clipped = gradient_clip_val or trainer.gradient_clip_val  # Lightning calls this after every step
        clipped_alone = [host_groups(raw), *([seed] for seed in seed_groups(raw))] if is_clipped else [groups]
        try:
            for host_or_seed in clipped_alone:
                raw.param_groups[:] = host_or_seed
                clip(raw, gradient_clip_val, *args, **kwargs)
        finally:
            raw.param_groups[:] = groups

    return clip_gradients


def wrap_without_seeds(trainer: Trainer, seeds: Iterable[nn.Module]) -> None:
    """Show DistributedDataParallel the host's parameters alone: it would wait for gradients of a culled seed, too."""
    strategy = trainer.strategy
    parameters = [parameter for seed in seeds for parameter in seed.parameters() if parameter.requires_grad]
    if parameters and isinstance(strategy, DDPStrategy):
        strategy.model = strategy.lightning_module  # releases the wrapper that knows the seeds, with its hooks
        for parameter in parameters:
            parameter.requires_grad_(False)
        strategy.configure_ddp()
        for parameter in parameters:
            parameter.requires_grad_(True)


def names_within(network: nn.Module, name: str, slots: Sequence[str]) -> list[str]:
    """Return slot names as seen from `network`: without the prefix `name.`, where the LightningModule's name has it."""
    modules = dict(network.named_modules())
    return [slot if slot in modules else slot.removeprefix(f"{name}.") for slot in slots]


def find_network(module: LightningModule, name: str | None, slots: list[str]) -> tuple[str, nn.Module]:
    """Return name and module of the network that grows: the one called `name`, as in `named_modules`.

    None: the only child with parameters that has, or can get, all `slots`; if none are named, the only one with slots.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    if name is not None:
        if name not in modules or not name:
            raise ValueError(f"Grow: unknown network {name!r}; {suggest_name(name, [n for n in modules if n])}")
        return name, modules[name]

    def fits(name: str, child: nn.Module) -> bool:
        """Return True if a child has, or can get, the named slots; if none are named, if it has any slot."""
        existing = slots_of(child)
        if not (missing := [slot for slot in names_within(child, name, slots) if slot not in existing]):
            return bool(existing)
        try:
            check_new_slots(child, missing)
        except ValueError:
            return False
        return True

    children = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
    candidates = {name: child for name, child in children.items() if fits(name, child)} or children
    if len(candidates) != 1:
        names = ", ".join(map(repr, candidates)) or "none"
        raise ValueError(
            f"Grow: the module's parts with parameters are {names}; give Grow(network=…) the name of the one that "
            f"grows (layers of the LightningModule itself cannot grow: put them into a module of their own)"
        )
    return next(iter(candidates.items()))


def find_optimizer(trainer: Trainer, network: nn.Module, name: str) -> Optimizer:
    """Return the only optimizer that trains the network. Raises ValueError if there is none that can grow."""
    parameters = {id(parameter) for parameter in network.parameters()}
    owners = [
        optimizer
        for optimizer in trainer.optimizers
        if any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])
    ]
    if len(owners) != 1:
        many = "several optimizers train" if owners else "no optimizer trains"
        raise ValueError(f"Grow: {many} the parameters of {name!r}; name a network that exactly one optimizer trains")
    (optimizer,) = owners
    check_optimizer(optimizer)
    precision = trainer.precision_plugin
    is_scaled = isinstance(precision, MixedPrecision) and precision.scaler is not None
    if is_scaled and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(
            "Grow: a fused optimizer under 16-mixed hides the size of gradients, by which seeds are judged; make it "
            "with fused=False"
        )
    return optimizer


def count_ticks(trainer: Trainer, every: int, *, epochs_over: int) -> int:
    """Return the ticks, of `every` validations, after `epochs_over` epochs. Raises ValueError if they are unknown."""
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
