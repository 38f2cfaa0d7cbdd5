"""One environment: a host in training, its optimizer, its random numbers and what has been measured of it."""

import math
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import initialise
from esper_lightning.envs.actions import ActionConfig, ActionSpace, Op
from esper_lightning.growth.alpha import Ramp
from esper_lightning.growth.gates import Evidence, LifecycleConfig
from esper_lightning.growth.gradients import GradientStats
from esper_lightning.growth.network import (
    SeedEvent,
    advance,
    count_parameters,
    cull,
    fossilize,
    germinate,
    manifest,
    rebuild,
    slots_of,
)
from esper_lightning.growth.optimizer import HOST_GROUP, add_group, forget, group_names, remove_group
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, kw_only=True)
class HostTraining:
    """How a host learns in one tick."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Update rule of the host and its seeds."""

    lr: float = 0.02
    """Learning rate of the host."""

    seed_lr_factor: float = 1.0
    """Learning rate of seeds over that of the host."""

    weight_decay: float = 0.0
    """Weight decay of host and seeds."""

    momentum: float = 0.9
    """Momentum; read by sgd alone."""

    batch_size: int = 32
    """Samples B in a host minibatch."""

    batches: int | None = None
    """Minibatches in a tick. None: one pass over the training data, without the incomplete last batch."""

    max_grad_norm: float | None = 5.0
    """Clip the gradient of the host, and of each seed, to this norm. None: do not clip."""

    onednn: bool = True
    """Let oneDNN run convolutions on the CPU. Off, torch's own kernels do: for hosts of a few channels they need 1.3 to
    1.8 times less processor time (measured on digits), for wide ones more."""

    def __post_init__(self) -> None:
        for name in ("lr", "seed_lr_factor", "batch_size", "batches", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"training.{name} must be positive, got {value}")
        if self.weight_decay < 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"training: weight_decay must not be negative and momentum must lie in [0, 1), "
                f"got {self.weight_decay} and {self.momentum}"
            )

    def options(self, group: str) -> dict[str, float]:
        """Of the host's or a seed's parameter group."""
        lr = self.lr if group == HOST_GROUP else self.lr * self.seed_lr_factor
        options = {"lr": float(lr), "weight_decay": float(self.weight_decay)}
        return options | ({"momentum": float(self.momentum)} if self.optimizer == "sgd" else {})

    def make_optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """An optimizer with the host's group alone."""
        group = {"params": list(network.parameters()), "name": HOST_GROUP}
        # Fused: one kernel for all tensors, and on CUDA no read-back of the scaler's verdict.
        return OPTIMIZERS[self.optimizer]([group], fused=True, **self.options(HOST_GROUP))


class Measured(NamedTuple):
    """What one host epoch and its validation showed, as Python numbers."""

    train_loss: float
    train_accuracy: float
    host_gradient: GradientStats
    seed_gradients: list[GradientStats]  # per slot
    loss: list[float]  # per variant: see `variants`
    accuracy: list[float]  # per variant


@dataclass
class SlotRecord:
    """What is known of the seed in a slot."""

    contribution: float | None = None  # accuracy points of 100
    previous_contribution: float | None = None
    gradient: GradientStats | None = None


@dataclass
class History:
    """One entry per tick since the episode began; validation also has one from before the first tick."""

    train_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


class HostEnv:
    """A host whose training is an episode. What happens depends on the seed of `reset` and on the actions alone.

    Args:
        network: A host with empty slots, on its device.
        space: The choices that actions index.
        training, lifecycle, actions: Settings.
        horizon: Ticks T in an episode.
    """

    def __init__(
        self,
        network: nn.Module,
        space: ActionSpace,
        training: HostTraining,
        lifecycle: LifecycleConfig,
        actions: ActionConfig,
        horizon: int,
    ) -> None:
        self.network = network
        self.space = space
        self.training = training
        self.lifecycle = lifecycle
        self.tempos = list(actions.tempos.values())
        self.horizon = horizon
        self.slots: list[SeedSlot] = list(slots_of(network).values())
        self.host_parameters = count_parameters(network)
        self.optimizer = training.make_optimizer(network)
        self.generator = torch.Generator(next(network.parameters()).device)
        self.seed = 0
        self._begin()

    def _begin(self) -> None:
        self.tick = 0
        self.last_op = Op.WAIT
        self.history = History()
        self.records = [SlotRecord() for _ in self.slots]
        self.objective = 0.0  # J as last measured
        self.host_gradient: GradientStats | None = None

    def reset(self, seed: int) -> None:
        """Starts a new episode in place: fresh weights, empty slots, no momentum."""
        self.seed = seed
        self.generator.manual_seed(seed)
        for name in group_names(self.optimizer):
            if name != HOST_GROUP:
                remove_group(self.optimizer, name)
        for slot in self.slots:
            slot.empty()  # first: an old seed would draw from the generator and change what follows
        initialise(self.network, self.generator)
        forget(self.optimizer)
        self._begin()

    def apply(self, op: Op, slot: int, blueprint: int, tempo: int) -> list[SeedEvent]:
        """Carries out one action. Raises ValueError if the lifecycle forbids it."""
        self.last_op = op
        if op is Op.WAIT:
            return []
        place = self.slots[slot]
        if op is Op.GERMINATE:
            ramp = Ramp(0.0, self.lifecycle.alpha_target, self.tempos[tempo], self.lifecycle.curve)
            event = germinate(place, self.space.blueprints[blueprint], ramp, self.generator)
            self.records[slot] = SlotRecord()
            add_group(self.optimizer, place.name, place.seed, **self.training.options(place.name))
        elif op is Op.CULL:
            event = cull(place)
            self._forget_seed(slot)
        else:
            event = fossilize(place)
        return [event]

    def _forget_seed(self, slot: int) -> None:
        remove_group(self.optimizer, self.slots[slot].name)
        self.records[slot] = SlotRecord()

    def draw_batches(self, samples: int) -> Tensor:  # [batches, B] int64, on the generator's device
        """Indices of the next tick's minibatches: the training data in a new order, again and again if need be."""
        size = self.training.batch_size
        needed = size * (self.training.batches or samples // size)
        passes = math.ceil(needed / samples)
        device = self.generator.device
        orders = [torch.randperm(samples, generator=self.generator, device=device) for _ in range(passes)]
        return torch.cat(orders)[:needed].view(-1, size)

    def variants(self) -> list[frozenset[str]]:
        """Combinations of seeds to validate: all, all but each slot in turn, and the fossilized ones alone."""
        everything = frozenset(slot.name for slot in self.slots)
        committed = frozenset(slot.name for slot in self.slots if slot.stage is Stage.FOSSILIZED)
        return [everything, *(everything - {slot.name} for slot in self.slots), committed]

    def record(self, measured: Measured) -> None:
        """Takes in the first validation of a fresh host, or what a host epoch showed."""
        self.history.loss.append(measured.loss[0])
        self.history.accuracy.append(measured.accuracy[0])
        for k, slot in enumerate(self.slots):
            if slot.blended:
                record = self.records[k]
                record.previous_contribution = record.contribution
                record.contribution = 100.0 * (measured.accuracy[0] - measured.accuracy[1 + k])

    def finish_tick(self, measured: Measured) -> list[SeedEvent]:
        """Takes in what the host epoch showed, and lets time pass for the seeds."""
        self.history.train_loss.append(measured.train_loss)
        self.history.train_accuracy.append(measured.train_accuracy)
        self.host_gradient = measured.host_gradient
        self.record(measured)
        self.tick += 1
        events = []
        for k, slot in enumerate(self.slots):
            if slot.occupied:
                self.records[k].gradient = measured.seed_gradients[k]
            slot.tick()
            happened = advance(slot, self.evidence(k), self.lifecycle, self.horizon)
            if any(event.after is Stage.CULLED for event in happened):
                self._forget_seed(k)
            events += happened
        return events

    def evidence(self, slot: int) -> Evidence:
        """What the gates may judge the seed in `slot` by."""
        place, record = self.slots[slot], self.records[slot]
        gradient = record.gradient
        return Evidence(
            ticks_in_stage=place.ticks_in_stage,
            alpha_share=place.ramp.value(place.ticks_in_stage) / place.ramp.target,
            gradient_norm=gradient.norm if gradient else None,
            gradient_health=gradient.health if gradient else None,
            contribution=record.contribution,
        )

    def seed_parameters(self, stages: frozenset[Stage]) -> int:
        """Parameters of the seeds that are in one of `stages`."""
        return sum(count_parameters(slot.seed) for slot in self.slots if slot.stage in stages)

    @property
    def committed_parameters(self) -> int:
        """Parameters of the host and of what is kept for good."""
        return self.host_parameters + self.seed_parameters(frozenset({Stage.FOSSILIZED}))

    def state_dict(self) -> dict[str, Any]:
        """Everything that continuation needs, in types that `torch.load(weights_only=True)` accepts."""
        return {
            "seed": self.seed,
            "tick": self.tick,
            "last_op": int(self.last_op),
            "objective": self.objective,
            "history": {name: list(values) for name, values in vars(self.history).items()},
            "records": [
                [r.contribution, r.previous_contribution, list(r.gradient) if r.gradient else None]
                for r in self.records
            ],
            "host_gradient": list(self.host_gradient) if self.host_gradient else None,
            "manifest": manifest(self.network),
            "network": self.network.state_dict(),
            "groups": group_names(self.optimizer),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken."""
        self.reset(state["seed"])
        self.tick, self.last_op, self.objective = state["tick"], Op(state["last_op"]), state["objective"]
        self.history = History(**{name: list(values) for name, values in state["history"].items()})
        self.records = [
            SlotRecord(contribution, previous, GradientStats(*gradient) if gradient else None)
            for contribution, previous, gradient in state["records"]
        ]
        self.host_gradient = GradientStats(*state["host_gradient"]) if state["host_gradient"] else None
        rebuild(self.network, state["manifest"])
        self.network.load_state_dict(state["network"])
        by_name = {slot.name: slot for slot in self.slots}
        for name in state["groups"]:
            if name != HOST_GROUP:
                add_group(self.optimizer, name, by_name[name].seed)
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))  # which would share its tensors
        for group in self.optimizer.param_groups:
            group.update(self.training.options(group["name"]))  # settings are this run's, not the checkpoint's
        self.generator.set_state(state["generator"].cpu())
