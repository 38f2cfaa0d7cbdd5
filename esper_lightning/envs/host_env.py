"""One environment: a host network in training with its optimizer, random generator and measurements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from esper_lightning.blueprints import get_blueprint, initialise
from esper_lightning.envs.context.context import HostContext
from esper_lightning.envs.device_transfer import variants_to_validate
from esper_lightning.envs.flops import HostFlops
from esper_lightning.envs.measurements import EpochResult, Score
from esper_lightning.envs.packing import pack, unpack
from esper_lightning.envs.spaces.actions import ActionConfig, ActionSpace, Op
from esper_lightning.envs.subject import Subject
from esper_lightning.governor.judge import EpochStats, Judgement
from esper_lightning.governor.monitor import HostMonitor
from esper_lightning.governor.snapshot import clone_tensors
from esper_lightning.growth.counterfactual import SeedVariant
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.lifecycle import SeedEvent
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import OCCUPIED
from esper_lightning.rewards import ObjectiveConfig, Prices, compute_rent, objective
from esper_lightning.tasks import Batches

if TYPE_CHECKING:
    from esper_lightning.profiling import HostTimer


class HostEnv(Subject):
    """An environment whose episode is the training of one host network: the subject, and what trains and prices it.

    An episode depends on the RNG seed of `reset` and on the actions alone. An environment step is one host epoch.

    Args:
        network: Host with empty slots, on `device`.
        space: Choices that the numbers of an action index.
        context: Context of the first episode; `set_context` replaces it.
        lifecycle, actions, objective: Settings.
        horizon: Length T of the longest episodes in environment steps; the context has that of an episode.
        device: Device of the network.
        timer: Timer of the work on this host.
        measure_host_only: True to validate the host with every seed switched off, too.
        flops: FLOPs of the host. None: compute has no price.
        architecture: Name of the architecture; hosts of one architecture can be stacked.

    Attributes:
        monitor: Monitor of the overseer that watches this host. None: the host is not watched.
    """

    def __init__(
        self,
        network: nn.Module,
        space: ActionSpace,
        context: HostContext,
        *,
        lifecycle: LifecycleConfig,
        actions: ActionConfig,
        objective: ObjectiveConfig,
        horizon: int,
        device: torch.device,
        timer: "HostTimer",
        measure_host_only: bool = False,
        flops: HostFlops | None = None,
        architecture: str = "",
    ) -> None:
        self.network = network
        self.device = device
        self.timer = timer
        self.monitor: HostMonitor | None = None
        self.measure_host_only = measure_host_only
        self.architecture = architecture
        self.longest = horizon
        self.set_context(context)
        self.optimizer = self.training.make_optimizer(network)
        self.generator = torch.Generator(self.device)
        self.loss_scale = self.training.make_loss_scale(self.device)
        growing = GrowingNetwork(
            network,
            self.optimizer,
            horizon=context.horizon,
            lifecycle=lifecycle,
            seed_options=self.training.group_options("seed"),
            generator=self.generator,
        )
        super().__init__(growing, space, actions=actions, objective=objective, flops=flops)
        self.data_order: Callable[[int, int], int] | None = None
        self.on_batches: Callable[[Batches], None] | None = None
        self.rng_seed = 0

    def set_context(self, context: HostContext) -> None:
        """Set the context that holds from the next reset on."""
        self.context = context
        self.training = context.training
        if self.monitor is not None:
            self.monitor.chance_loss = context.chance_loss

    @property
    def horizon(self) -> int:
        """Length of the episode in environment steps."""
        return self.context.horizon

    @property
    def ended(self) -> bool:
        """True if nothing can grow any more, because the episode was stopped or is shorter than the longest ones."""
        return self.stopped or (self.horizon < self.longest and self.tick >= self.horizon)

    def _clear(self) -> None:
        super()._clear()
        self.objective = 0.0  # J at the last measurement
        self.failure: str | None = None  # out-of-memory message of the last host epoch
        self.lr_factor = 1.0

    def reset(self, rng_seed: int) -> None:
        """Start a new episode in place: fresh weights, empty slots, no optimizer state."""
        self.rng_seed = rng_seed
        self.growing.horizon = self.horizon
        self.generator.manual_seed(rng_seed)
        self.loss_scale = self.training.make_loss_scale(self.device)
        self.growing.clear()  # first: an old seed would consume random numbers of the new episode
        initialise(self.network, self.generator)
        self._clear()
        self._set_optimizer_options()
        if self.monitor is not None:
            self.monitor.reset()

    @property
    def lr_share(self) -> float:
        """Learning rate of the coming epoch as a share of the configured one, 0 to 1."""
        return self.lr_factor * self.training.lr_share(self.tick / self.horizon)

    def _set_optimizer_options(self) -> None:
        """Set the optimizer options of the coming epoch in this run, in place of those of a loaded state."""
        share = self.lr_share
        for group in self.optimizer.param_groups:
            options = self.training.group_options(group["name"])
            group.update(options, lr=options["lr"] * share)
        seed_options = self.training.group_options("seed")
        self.growing.seed_options = seed_options | {"lr": seed_options["lr"] * share}

    def record_epoch(self, result: EpochResult, hold_stages: bool = False) -> list[SeedEvent]:
        """Record the result of an epoch, advance the lifecycle of the seeds and the schedule of the learning rate."""
        events = super().record_epoch(result, hold_stages)
        if self.training.lr_schedule != "constant":
            self._set_optimizer_options()
        return events

    def refusal_reasons(self, action: Sequence[int]) -> list[str]:
        """Return the overseer's reasons to veto an action; an empty list allows it."""
        if self.monitor is None:
            return []
        chosen, parameters = self.space.decode(action), self.host_parameters + self.seed_parameters(OCCUPIED)
        if action[0] == Op.GERMINATE:
            slot = self.growing.slots[chosen.slot]
            parameters += get_blueprint(chosen.blueprint, slot.layout).parameters(slot.width)
        return self.monitor.refusal_reasons(chosen.op, parameters / self.host_parameters)

    def draw_batches(self, samples: int) -> Batches:  # [batches, B], on the generator's device
        """Draw the sample indices of the next epoch; `samples` is the size of each data variant."""
        if self.data_order is not None:
            self.generator.manual_seed(self.data_order(self.rng_seed, self.tick))
        batches = self.context.draw_batches(self.training, samples, self.rng_seed, generator=self.generator)
        if self.on_batches is not None:
            self.on_batches(batches)
        return batches

    def set_batch_hooks(
        self,
        data_order: Callable[[int, int], int] | None = None,
        on_batches: Callable[[Batches], None] | None = None,
    ) -> None:
        """Set hooks that fix and observe the minibatches of the coming host epochs; no arguments remove them.

        Args:
            data_order: Function of the episode's RNG seed and the tick, which returns the RNG seed of the epoch's
                minibatches. None: they depend on everything drawn before, such as the weights of seeds.
            on_batches: Callback for the minibatches of each host epoch, after the action and before training.
        """
        self.data_order, self.on_batches = data_order, on_batches

    def end(self) -> None:
        """End the episode before the horizon; the host stays idle until the next reset."""
        self.stopped = True

    @property
    def prices(self) -> Prices:
        """Prices of added parameters and compute in this episode."""
        return self.context.prices(self.objective_config, self.rng_seed)

    @property
    def failing_slots(self) -> list[SeedSlot]:
        """Slots whose seed receives no gradient in this episode."""
        return self.context.failing_slots(self.slots, self.rng_seed)

    def variants(self) -> list[SeedVariant]:
        """Return the combinations of seeds to validate with; see `Validation`."""
        return variants_to_validate(
            self.slots, host_only=self.measure_host_only, potential=self.lifecycle.min_potential is not None
        )

    def update_objective(self) -> Score:
        """Update the objective J from the last validation.

        Returns the score that J is computed from: with all seeds, or at the horizon with the fossilized ones only.
        """
        assert self.validated is not None, "an episode begins with a validation"
        score = self.validated.fossilized if self.tick >= self.horizon else self.validated.all_seeds
        self.objective = self.objective_at(score.accuracy)
        return score

    def objective_at(self, accuracy: float) -> float:
        """Return the objective J of the host with its fossilized seeds for a given accuracy in 0 … 1.

        The precision is that of the network, at least float32.
        """
        config, prices = self.objective_config, self.prices
        dtype = torch.promote_types(next(self.network.parameters()).dtype, torch.float32)
        charge: torch.Tensor | float = 0.0
        if config.charges_compute:
            assert self.flops is not None, "they are counted where compute has a price"
            flops = torch.tensor([[self.fossilized_flops], [self.flops.host]])
            charge = compute_rent(flops[0], flops[1], torch.tensor([prices.compute]))
        parameters = torch.tensor([[self.fossilized_parameters], [self.host_parameters]])
        accuracies, price = torch.tensor([accuracy], dtype=dtype), torch.tensor([prices.parameters])
        return objective(
            accuracies, parameters[0], parameters[1], config=config, price=price, compute_cost=charge
        ).item()

    def judge_epoch(self, result: EpochResult | None) -> Judgement:
        """Return the monitor's judgement on a host epoch. `result` is None if the host ran out of memory."""
        assert self.monitor is not None, "only an overseer asks"
        if self.failure is not None:
            return self.monitor.judge_failure(self.failure)
        assert result is not None, "only a failure leaves no result"
        training, validation = result
        stats = (training.host_gradient, *training.seed_gradients)
        # With loss scaling, gradients overflow fp16 occasionally, and the optimizer skips those steps.
        gradients = () if self.loss_scale is not None else tuple(stat.norm for stat in stats)
        alphas = [slot.alpha_now if slot.blended else 0.0 for slot in self.slots]
        epoch_stats = EpochStats(validation.all_seeds.loss, training.loss, gradients)
        return self.monitor.judge(epoch_stats, training.skipped_steps, alphas)

    def take_snapshot(self) -> None:
        """Take a snapshot of the current host for a later rollback."""
        assert self.monitor is not None, "only an overseer takes snapshots"
        self.monitor.take_snapshot(self._host_state())

    def roll_back(self, ended: bool, cause: str) -> list[SeedEvent]:
        """Roll the host back to its last snapshot and cull its live seeds; the tick count still moves on by one.

        Args:
            ended: True to end the episode.
            cause: Reason for the culls, for the events.

        Returns one event for each slot whose stage differs from its stage before the rollback, so that the sequence of
        events stays complete.
        """
        assert self.monitor is not None, "only an overseer rolls back"
        events = [self.growing.status_event(slot.name) for slot in self.slots]
        tick, factor = self.tick, self.lr_factor * self.monitor.config.lr_factor
        # A copy: optimizer state loaded from a view would keep the snapshot's whole memory alive.
        self._load_host(self.monitor.snapshot.copy())
        self.tick, self.lr_factor, self.stopped = tick + 1, factor, ended
        self._set_optimizer_options()
        self.growing.cull_live_seeds(cause)
        pairs = zip(events, self.slots, strict=True)
        return [
            replace(event, after=slot.stage, cause=cause) for event, slot in pairs if event.before is not slot.stage
        ]

    def packed_state(self) -> dict[str, Any]:
        """Return a copy of the complete state, packed: plain data that `torch.load(weights_only=True)` accepts."""
        state = self._host_state()
        monitor = self.monitor.state_view() if self.monitor is not None else None  # `pack` copies it
        return pack(state | {"ended": self.stopped, "monitor": monitor})

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the complete state."""
        return unpack(self.packed_state())

    def _host_state(self) -> dict[str, Any]:
        return self.record_state() | {
            "rng_seed": self.rng_seed,
            "objective": self.objective,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "lr_factor": self.lr_factor,
            "growing": self.growing.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`. Raises ValueError if its weights or optimizer do not fit this host."""
        self.reset(state["rng_seed"])
        # A copy: optimizer state loaded from a part of a larger memory would keep all of it alive.
        self._load_host(clone_tensors({key: value for key, value in state.items() if key != "monitor"}))
        self.stopped = bool(state["ended"])
        if self.monitor is not None:
            if state["monitor"] is not None:
                self.monitor.load_state_dict(state["monitor"])
            else:  # the saved host was not watched, so this is the first state to snapshot
                self.take_snapshot()

    def _load_host(self, state: Mapping[str, Any]) -> None:
        self._clear()
        self.rng_seed = state["rng_seed"]
        self.load_record_state(state)
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        self.objective, self.lr_factor = state["objective"], state["lr_factor"]
        self.growing.load_state_dict(state["growing"])
        self._set_optimizer_options()
