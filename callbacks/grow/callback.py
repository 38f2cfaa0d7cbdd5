"""Callback that grows the network of a LightningModule while its Trainer trains it."""

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_lightning.callbacks.grow.deciders import (
    Decider,
    decider_name,
    decider_state,
    make_decider,
    resume_decider,
)
from esper_lightning.callbacks.grow.fitting import (
    average_gradients,
    count_ticks,
    default_dtype_of,
    may_be_last_step,
    may_skip_steps,
    separate_clipping,
    share_buffers,
    wrap_without_seeds,
)
from esper_lightning.callbacks.grow.refusals import (
    check_network,
    check_trainer,
    check_wrapper,
    find_network,
    find_optimizer,
)
from esper_lightning.callbacks.grow.report import GrowthReport, growth_metrics
from esper_lightning.callbacks.grow.scale import Measured, Scale
from esper_lightning.callbacks.grow.scoring import Meter, VariantMeter, first_rows, load_batches
from esper_lightning.controllers.transfer import TrainingRules
from esper_lightning.envs import ActionConfig, ActionSpace, EnvConfig
from esper_lightning.envs.flops import HostFlops, count_flops
from esper_lightning.envs.measurements import EpochResult, TrainingStats
from esper_lightning.envs.single_pool import SinglePool
from esper_lightning.envs.spaces.action_discovery import probe_action_space
from esper_lightning.envs.spaces.observation import ObservationConfig
from esper_lightning.envs.subject import Subject
from esper_lightning.growth import GrowingNetwork, SeedEvent, attach_from_state_dict, attach_slots, slots_of
from esper_lightning.growth.attach import attach_from_records, attachment_records
from esper_lightning.growth.counterfactual import ScoreFunction
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.gradient_stats import GradientStats
from esper_lightning.growth.nested import ExampleInput, batch_size, call_network, iter_tensors
from esper_lightning.growth.schedules import follow, host_groups
from esper_lightning.rewards import ObjectiveConfig

STATE_FORMAT = 3
"""Version of the callback's state in a checkpoint."""

PROBE_ROWS = 4
"""Samples on which each blueprint is tried once, before training; two at least, for BatchNorm."""

NO_GRADIENT_SEEN = GradientStats(norm=0.0, rms=0.0, vanished=1.0, exploded=0.0)
"""Statistics of parameters that no gradient has reached since the last tick."""


class Grow(Callback):
    """Grows one network of a LightningModule while its own training goes on.

    After each validation a decider chooses one action: put a seed into a slot, make one permanent, remove one, or
    wait. The action is carried out before the next training batch, so that a checkpoint holds the network as it was
    validated. Until something grows the training is bit for bit what it is without this callback. The guide is
    docs/guides/grow.md.

    Args:
        slots: Modules of the network behind which seeds may grow, as in `attach_slots`. Empty: it has slots already.
        network: Name of the network in the LightningModule. None: its only child with parameters and these slots.
        blueprints: Kinds of seeds on offer, by name or import path. None: all of this package that fit the network's
            features.
        decider: `heuristic`, `climbing`, `periodic`, or the name or import path of your own; a schedule (`x.json`); a
            trained policy (`x.ckpt` or `x.safetensors`), or `tamiyo`, the policy of the package; or any object with
            `reset(pool)` and `act(pool)`.
        monitor: Name of the logged validation metric by which seeds are judged.
        mode: `max` for a share from 0 to 1, such as accuracy; `min` for a loss.
        score: Function of outputs and targets that returns a number from 0 to 1 per sample, in place of `monitor`.
            All combinations of seeds are then measured in one pass of the network; batches must be pairs.
        loss: Name of the logged validation loss that deciders see. None: the monitored loss in mode `min`, otherwise
            -ln of the metric.
        batches: Validation batches, kept in memory, on which each seed is compared with its absence: the first ones of
            the loader. Shuffle validation data that are sorted by class.
        every: Validations per tick; a decision follows each tick.
        horizon: Ticks of the whole training; afterwards nothing is decided. None: from the trainer's `max_epochs`.
        price: Share of the metric (0 to 1) that a growth by a factor of e must add to be worth it.
        lifecycle: Conditions under which seeds change their stage. None: those of the training of a trained policy,
            otherwise the defaults.
        actions: Further choices of the decider, such as the speeds of blending. None: as for `lifecycle`; a trained
            policy needs those of its training.
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
        mode: Literal["max", "min"] = "max",
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
        for name, given, kind in (("lifecycle", lifecycle, LifecycleConfig), ("actions", actions, ActionConfig)):
            if given is not None and not isinstance(given, kind):
                raise ValueError(
                    f"Grow: {name} must be esper_lightning.{kind.__name__}(…), got {type(given).__name__}; make one"
                )
        if mode not in ("max", "min"):
            raise ValueError(f"Grow: mode must be 'max' or 'min', got {mode!r}")
        if score is not None and mode == "min":
            raise ValueError("Grow: a score grows with quality; leave mode at 'max'")
        self.decider = make_decider(decider)
        self.decider_name = decider_name(decider)
        rules = getattr(self.decider, "rules", None) or TrainingRules(LifecycleConfig(), ActionConfig())
        lifecycle, actions = lifecycle or rules.lifecycle, actions or rules.actions
        if lifecycle.isolation == "trial":
            raise ValueError(
                "Grow: lifecycle.isolation trial needs a backward pass of its own, which a Trainer does not make; use "
                "proximal or straight_through"
            )
        self.slot_names = [slots] if isinstance(slots, str) else list(slots)
        self.network_name = network
        if blueprints is not None and actions.blueprints is not None:
            raise ValueError("Grow: blueprints are named twice; leave actions.blueprints out")
        if isinstance(blueprints, str):
            blueprints = [blueprints]
        self.actions = replace(actions, blueprints=blueprints or actions.blueprints)
        self.meter = Meter(monitor, score)
        self.scale = Scale(monitor, mode)
        self.loss = loss
        self.num_batches = batches
        self.every = every
        self.horizon = horizon
        self.objective = ObjectiveConfig(price=price)
        self.lifecycle = lifecycle
        self._config(1)  # raises ValueError now if settings contradict each other
        self.seed_options = {name: float(value) for name, value in (seed_options or {}).items()}
        self.rng_seed = rng_seed
        self._forget()

    def _forget(self) -> None:
        """Begin without anything from an earlier training."""
        self.pool: SinglePool | None = None
        """The network as deciders see it; None before training."""
        self.validations = 0
        self._growing: GrowingNetwork | None = None
        self._restored: dict[str, Any] = {}
        self._contributions: dict[str, float] = {}
        self._potentials: dict[str, float] = {}
        self._pending: Measured | None = None
        self._may_skip_steps = False
        self._gradients: Tensor | None = None  # [1 + K, 4]: those of the host, then of the seed in each slot
        self._train_loss: Tensor | float = 0.0  # sum over batches since the last tick
        self._train_batches = 0
        self._plateau_due = False
        self._report: GrowthReport | None = None
        self._variant_meter: VariantMeter | None = None

    def _config(self, horizon: int) -> EnvConfig:
        """Return the settings that deciders see."""
        return EnvConfig(
            horizon=horizon,
            lifecycle=self.lifecycle,
            actions=self.actions,
            objective=self.objective,
            sight=getattr(self.decider, "sight", ObservationConfig()),  # that of a policy over sets
        )

    @property
    def growing(self) -> GrowingNetwork:
        """The network with its optimizer and measurements, once training has begun."""
        return self._pool.subject.growing

    @property
    def _meter(self) -> VariantMeter:
        assert self._variant_meter is not None, "training has begun, and has not ended"
        return self._variant_meter

    @property
    def _told(self) -> GrowthReport:
        assert self._report is not None, "training has begun"
        return self._report

    @property
    def _pool(self) -> SinglePool:
        assert self.pool is not None, "training has begun"
        return self.pool

    # The network is found, and takes the slots of a checkpoint before its weights are loaded.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._unwrap(pl_module)  # an earlier run may have failed
        self.network_name, self.network = find_network(pl_module, self.network_name, self.slot_names)
        self._own_slots = frozenset([*slots_of(self.network), *self.slot_names])
        load = pl_module.on_load_checkpoint

        def attach_first(checkpoint: dict[str, Any]) -> None:
            # Callbacks are restored after the module, whose weights are loaded strictly.
            self._attach_saved(checkpoint)
            load(checkpoint)

        vars(pl_module)["on_load_checkpoint"] = attach_first
        if stage == "fit":
            self._forget()
            check_trainer(trainer, pl_module)
            check_network(self.network, self.network_name)
            vars(pl_module)["clip_gradients"] = separate_clipping(pl_module.clip_gradients, trainer)
            zero_grad = pl_module.on_validation_model_zero_grad

            def measure_first() -> None:
                # A timer may have stopped the training after a step that no validation was expected to follow.
                if self._gradients is None and not self._may_skip_steps:
                    self._gradients = self.growing.gradient_stats_tensor()
                zero_grad()

            vars(pl_module)["on_validation_model_zero_grad"] = measure_first

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._unwrap(pl_module)
        self._variant_meter = None  # releases its batches
        if self._report is not None:
            self._report.close()

    def _unwrap(self, module: LightningModule) -> None:
        for name in ("on_load_checkpoint", "clip_gradients", "on_validation_model_zero_grad"):
            vars(module).pop(name, None)

    def _attach_saved(self, checkpoint: Mapping[str, Any]) -> None:
        """Attach the slots that a checkpoint tells of and that the network lacks."""
        existing = slots_of(self.network)
        records = checkpoint.get("callbacks", {}).get(self.state_key, {}).get("attached", [])
        attach_from_records(self.network, [record for record in records if record["slot"] not in existing])
        attach_from_state_dict(self.network, checkpoint["state_dict"], prefix=f"{self.network_name}.")

    # Training begins.

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_wrapper(trainer)
        self.optimizer = find_optimizer(trainer, self.network, str(self.network_name))
        if slots_of(self.network):
            # Lightning restores optimizer and schedulers after this hook; seeds must have their groups by then.
            self._hold_seeds(trainer)
            wrap_without_seeds(trainer, (slot.seed for slot in slots_of(self.network).values()))

    def _hold_seeds(self, trainer: Trainer) -> None:
        device = next(iter(slots_of(self.network).values())).alpha.device
        host = host_groups(self.optimizer)[0]
        host.setdefault("initial_lr", host["lr"])  # a rate that is set by hand has no scheduler that remembers it
        self._growing = GrowingNetwork(
            self.network,
            self.optimizer,
            horizon=1,  # until the number of batches is known, when training begins
            lifecycle=self.lifecycle,
            seed_options=self.seed_options,
            generator=torch.Generator(device).manual_seed(self.rng_seed),
        )
        for config in trainer.lr_scheduler_configs:
            if config.scheduler.optimizer == self.optimizer:
                follow(config.scheduler, self._growing)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state, self._restored = self._restored, {}
        # A run of this callback that goes on counts from its own beginning; epochs before it are over.
        epochs_over = 0 if state else trainer.current_epoch
        horizon = self.horizon or count_ticks(trainer, self.every, epochs_over=epochs_over)
        self._may_skip_steps = may_skip_steps(trainer)
        batches = load_batches(trainer, self.num_batches)
        self._variant_meter = VariantMeter(trainer, pl_module, self.network, meter=self.meter, batches=batches)
        if state:
            self._check_state(state)
            space = self.actions.make_space(state["slots"], state["blueprints"])
            growable = torch.tensor(state["growable"])
        else:
            example = self._meter.example_input(str(self.network_name))
            missing = [name for name in self.slot_names if name not in slots_of(self.network)]
            if batch_size(example) < 2:
                raise ValueError("Grow: the first validation batch has one sample; give the loader a batch_size of 2")
            with isolate_rng(), default_dtype_of(self.network):
                if missing:
                    attach_slots(self.network, missing, example)
                space, growable = self._find_space(example)
            growable = trainer.strategy.broadcast(growable)
        if self._growing is None:
            self._hold_seeds(trainer)
        assert self._growing is not None, "the network has slots"
        self._growing.horizon = horizon
        config = self._config(horizon)
        flops = self._count_flops() if config.sight.needs_flops else None
        subject = Subject(self._growing, space, actions=self.actions, objective=self.objective, flops=flops)
        self.pool = SinglePool(subject, growable, config)
        if state:
            self._continue(trainer, state)
        self._report = GrowthReport(trainer, self.pool, is_resumed=bool(state))
        if not state:
            self._begin(trainer)

    def _find_space(self, example: ExampleInput) -> tuple[ActionSpace, Tensor]:
        """Return the choices of each head, and which blueprint can grow in which slot, by a trial on a few samples."""
        rows = first_rows(example, PROBE_ROWS)
        trial = self._emptied_network()

        def loss_of(network: nn.Module) -> Tensor:
            outputs = [x for x in iter_tensors(call_network(network, rows)) if x.is_floating_point()]
            return torch.stack([(x.float() - 1.0).square().mean() for x in outputs]).sum()

        return probe_action_space(trial, loss_of, actions=self.actions, birth=self.lifecycle.birth)

    def _emptied_network(self) -> nn.Module:
        """Return a copy of the network with empty slots."""
        trial = copy.deepcopy(self.network)
        for slot in slots_of(trial).values():
            slot.empty()
        return trial

    def _count_flops(self) -> HostFlops:
        """Return the FLOPs of the network with empty slots for one sample."""
        trial = self._emptied_network()
        row = first_rows(self._meter.example_input(str(self.network_name)), 1)
        with isolate_rng(), default_dtype_of(trial):
            return count_flops(trial, lambda: call_network(trial, row))

    def _begin(self, trainer: Trainer) -> None:
        """Measure the network before its first epoch, and let the decider choose its first action."""
        pool, meter = self._pool, self._meter
        blended = frozenset(slot.name for slot in pool.subject.slots if slot.blended)
        (metric,) = meter.measure([blended])
        self.scale.warn_if_blind(metric)
        loss = None if self.loss is None else meter.measure_logged([blended], self.loss)[0]
        pool.begin(self.scale.validation(Measured(metric, loss, {}, {}), pool.space.slot))
        self.decider.reset(pool)
        self._told.tell(self._decide(trainer), {})

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the state of a checkpoint does not belong to this network and these settings."""
        if state["format"] != STATE_FORMAT:
            raise ValueError(
                f"Grow: the checkpoint is of format {state['format']}, this version reads {STATE_FORMAT}; continue it "
                f"with the version that wrote it, or train anew"
            )
        slots = [name for name in slots_of(self.network) if name in self._own_slots]
        slots += [name for name in self.slot_names if name not in slots]
        if state["slots"] != slots:
            raise ValueError(f"Grow: the checkpoint is of slots {state['slots']}, the run of {slots}; name the same")
        if self.actions.blueprints not in (None, state["blueprints"]):
            raise ValueError(
                f"Grow: the checkpoint is of blueprints {state['blueprints']}, these are {self.actions.blueprints}; "
                f"name the same, or leave them out"
            )

    def _continue(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Continue a training from the state of a checkpoint."""
        pool = self._pool
        # The training may go on for fewer epochs than it was to have; only rewards, of which there are none here,
        # read the ticks that were left when a seed was fossilized.
        pool.subject.load_record_state(state["record"], max_ticks_left=sys.maxsize)
        pool.subject.growing.load_measurement_state(state)
        pool.update()
        resume_decider(self.decider, self.decider_name, pool, saved=state["decider"])
        self.validations = state["validations"]
        self._pending = None if state["pending"] is None else Measured(*state["pending"])
        self._gradients = state["gradients"]
        self._train_loss, self._train_batches = state["train_loss"], state["train_batches"]
        # Lightning steps these schedulers after the hooks that save checkpoints, and not again in a resumed run.
        for config, value in zip(trainer.lr_scheduler_configs, state["plateaus"], strict=False):
            if value is not None:
                config.scheduler.step(value)

    # One tick: a validation is measured, and followed by a decision before the next training batch.

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_validation_of_fit(trainer):
            return
        self.validations += 1
        self._contributions, self._potentials = {}, {}
        if self.validations % self.every != 0:
            return
        slots = self._pool.subject.slots
        blended = [slot.name for slot in slots if slot.blended]
        isolated = [slot.name for slot in slots if slot.isolated and self.lifecycle.min_potential is not None]
        if trainer.world_size > 1:
            share_buffers(slot.seed for slot in slots)
        if blended or isolated:
            seeds = frozenset(blended)
            variants = [seeds, *(seeds - {name} for name in blended), *(seeds | {name} for name in isolated)]
            whole, *others = self._meter.measure(variants)
            without, trials = others[: len(blended)], others[len(blended) :]
            points = self.scale.points
            self._contributions = {name: points(whole, other) for name, other in zip(blended, without, strict=True)}
            self._potentials = {name: points(trial, whole) for name, trial in zip(isolated, trials, strict=True)}

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_validation_of_fit(trainer):
            return
        metrics = growth_metrics(self._pool, self._contributions, self._potentials)
        pl_module.log_dict(metrics, sync_dist=trainer.world_size > 1, batch_size=1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_validation_of_fit(trainer):
            return
        self._plateau_due = trainer.is_last_batch
        if self.validations % self.every == 0:
            if self.meter.score is None:
                metric = self._logged(trainer, self.meter.monitor)
            else:
                blended = frozenset(slot.name for slot in self._pool.subject.slots if slot.blended)
                (metric,) = self._meter.measure([blended])
            loss = None if self.loss is None else self._logged(trainer, self.loss)
            self._pending = Measured(metric, loss, self._contributions, self._potentials)

    def _logged(self, trainer: Trainer, name: str) -> float:
        """Return a metric of the validation that has just ended, averaged over processes."""
        if name not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics))
            raise ValueError(f"Grow: no {name!r} was logged; log it in validation, or name one of: {logged}")
        value = trainer.callback_metrics[name].detach().to(trainer.strategy.root_device, torch.float32)
        return float(trainer.strategy.reduce(value, reduce_op="mean"))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plateau_due = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pool = self._pool
        events = pool.record(
            EpochResult(self._training_stats(pending), self.scale.validation(pending, pool.space.slot))
        )
        if pool.subject.tick < pool.subject.horizon:
            events += self._decide(trainer)
        self._told.tell(events, pending.contributions)
        self._gradients, self._train_loss, self._train_batches = None, 0.0, 0

    def _decide(self, trainer: Trainer) -> list[SeedEvent]:
        """Carry out the decision of the first process in all of them."""
        action = self._pool.choose(self.decider) if trainer.is_global_zero else []
        return self._pool.apply(trainer.strategy.broadcast(action))

    def _training_stats(self, measured: Measured) -> TrainingStats:
        """Return the statistics of the training since the last tick.

        The accuracy is that of validation, and so is the loss if no training step has returned one.
        """
        num_groups = 1 + len(self._pool.subject.slots)
        rows = [NO_GRADIENT_SEEN] * num_groups if self._gradients is None else self._gradients.tolist()
        host, *seeds = (GradientStats(*row) for row in rows)
        batches = self._train_batches
        loss = float(self._train_loss) / batches if batches else self.scale.loss(measured)
        return TrainingStats(loss, self.scale.accuracy(measured.metric), 0, host, seeds)

    def _is_validation_of_fit(self, trainer: Trainer) -> bool:
        return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking

    # What happens in a training step.

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            average_gradients(trainer, (slot.seed for slot in self._pool.subject.slots if slot.occupied))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measure gradients before a validation, unscaled and before clipping: Lightning releases them first."""
        # Those of the first step are used if the last one overflowed, or if a manual optimization skips it.
        is_due = may_be_last_step(trainer) or (self._may_skip_steps and self._gradients is None)
        if not is_due or optimizer is not self.optimizer:
            return
        measured, precision = self._pool.subject.growing.gradient_stats_tensor(), trainer.precision_plugin
        if self._gradients is not None and isinstance(precision, MixedPrecision) and precision.scaler is not None:
            # The scaler skips a step whose gradients overflowed fp16.
            measured = torch.where(measured.isfinite().all(), measured, self._gradients.to(measured))
        self._gradients = measured

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
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
        """Return all that the network, the optimizer and the schedulers do not hold."""
        if self.pool is None:
            return {}
        pool = self.pool
        return {
            "format": STATE_FORMAT,
            "slots": pool.space.slot,
            "attached": attachment_records(self.network),
            "blueprints": pool.space.blueprint,
            "growable": pool.growable.tolist(),
            "record": pool.subject.record_state(),
            **pool.subject.growing.measurement_state(),
            "decider": decider_state(self.decider, self.decider_name),
            "validations": self.validations,
            "pending": None if self._pending is None else list(self._pending),
            "gradients": None if self._gradients is None else self._gradients.cpu(),
            "train_loss": float(self._train_loss),
            "train_batches": self._train_batches,
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add to the callback's state the values with which schedulers on a plateau are still to be stepped."""
        if self.state_key in checkpoint["callbacks"]:
            metrics = trainer.callback_metrics
            checkpoint["callbacks"][self.state_key]["plateaus"] = [
                float(metrics[config.monitor])
                if self._plateau_due and config.reduce_on_plateau and config.monitor in metrics
                else None
                for config in trainer.lr_scheduler_configs
            ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._told.tell_end(str(self.network_name))
