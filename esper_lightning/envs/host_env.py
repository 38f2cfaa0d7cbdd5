"""One environment: a host network in training with its optimizer, random generator and measurements."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from esper_lightning.blueprints import get, initialise
from esper_lightning.envs.actions import STYLES, ActionConfig, ActionSpace, Op
from esper_lightning.envs.compute import Compute
from esper_lightning.envs.guard import Guard
from esper_lightning.envs.habitat import Habitat
from esper_lightning.envs.measured import EpochResult, History, Score, Validation
from esper_lightning.envs.restore import as_state, check_accounts, check_guard, check_host, check_validation
from esper_lightning.envs.transfer import variants_to_validate
from esper_lightning.governor import Reading, Verdict
from esper_lightning.growth.counterfactual import Variant, committed_only
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.gradients import GradientStats
from esper_lightning.growth.growing import GrowingNetwork, SeedRecord
from esper_lightning.growth.network import SeedEvent, count_parameters
from esper_lightning.growth.restoring import check_parts
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import OCCUPIED, Stage
from esper_lightning.rewards import Account, ObjectiveConfig, Prices, compute_rent, objective
from esper_lightning.tasks import Batches

if TYPE_CHECKING:
    from esper_lightning.envs.execution import Laps


class HostEnv:
    """An environment whose episode is the training of one host network.

    An episode depends on the RNG seed of `reset` and on the actions alone. An environment step is one host epoch.

    Args:
        network: Host with empty slots, on `device`.
        space: Choices that the numbers of an action index.
        habitat: Context of the first episode; `set_context` replaces it.
        lifecycle, actions, objective: Settings.
        horizon: Length T of an episode in environment steps.
        device: Device of the network.
        laps: Timer of the work on this host.
        guard: Monitor that the Governor uses for this host. None: the Governor is disabled.
        bare: True to validate the host with every seed switched off, too.
        compute: FLOPs of the host. None: compute has no price.
        kind: Name of the architecture; hosts of one architecture can be stacked.
    """

    def __init__(
        self,
        network: nn.Module,
        space: ActionSpace,
        habitat: Habitat,
        lifecycle: LifecycleConfig,
        actions: ActionConfig,
        objective: ObjectiveConfig,
        horizon: int,
        device: torch.device,
        laps: "Laps",
        guard: Guard | None = None,
        bare: bool = False,
        compute: Compute | None = None,
        kind: str = "",
    ) -> None:
        self.network = network
        self.space = space
        self.actions = actions
        self.horizon = horizon
        self.host_parameters = count_parameters(network)
        self.device = device
        self.laps = laps
        self.guard = guard
        self.bare = bare
        self.compute = compute
        self.kind = kind
        self.objective_config = objective
        self.join(habitat)
        self.optimizer = self.training.make_optimizer(network)
        self.generator = torch.Generator(self.device)
        self.scaler = self.training.make_scaler(self.device)
        self.growing = GrowingNetwork(
            network,
            self.optimizer,
            horizon=horizon,
            lifecycle=lifecycle,
            seed_options=self.training.options("seed"),
            carry_over=self.training.carry_over,
            generator=self.generator,
        )
        self.data_order: Callable[[int, int], int] | None = None
        self.on_batches: Callable[[Batches], None] | None = None
        self.seed = 0
        self._begin()

    def join(self, habitat: Habitat) -> None:
        """Set the context that holds from the next reset on."""
        self.habitat = habitat
        self.training = habitat.training
        if self.guard is not None:
            self.guard.chance = habitat.chance

    def _begin(self) -> None:
        self.tick = 0
        self.last_op = Op.WAIT
        self.history = History()
        self.objective = 0.0  # J at the last measurement
        self.accounts = [Account() for _ in self.growing.slots]
        self.validated: Validation | None = None  # of the last validation
        self.host_gradient: GradientStats | None = None
        self.skipped_steps = 0  # in this episode, because gradients overflowed fp16
        self.ended = False  # before the horizon: the host is idle until the next reset
        self.failure: str | None = None  # out-of-memory message of the last host epoch
        self.lr_factor = 1.0

    @property
    def slots(self) -> list[SeedSlot]:
        return list(self.growing.slots.values())

    @property
    def records(self) -> list[SeedRecord]:
        """Measurements of the seed in each slot, [K]."""
        return list(self.growing.records.values())

    @property
    def lifecycle(self) -> LifecycleConfig:
        return self.growing.lifecycle

    def reset(self, seed: int) -> None:
        """Start a new episode in place: fresh weights, empty slots, no optimizer state."""
        self.seed = seed
        self.generator.manual_seed(seed)
        self.scaler = self.training.make_scaler(self.device)
        self.growing.clear()  # first: an old seed would consume random numbers of the new episode
        initialise(self.network, self.generator)
        self._begin()
        self._set_options()
        if self.guard is not None:
            self.guard.begin()

    def _set_options(self) -> None:
        """Set the optimizer options of this run, in place of those of a loaded state."""
        for group in self.optimizer.param_groups:
            options = self.training.options(group["name"])
            group.update(options, lr=options["lr"] * self.lr_factor)
        seed = self.training.options("seed")
        self.growing.seed_options = seed | {"lr": seed["lr"] * self.lr_factor}

    def apply(self, decision: Sequence[int]) -> list[SeedEvent]:
        """Execute one action, an index per head. Raises ValueError if the lifecycle forbids it."""
        chosen, growing = self.space.choose(decision), self.growing
        self.last_op = Op(decision[0])
        match self.last_op:
            case Op.WAIT:
                return []
            case Op.GERMINATE:
                curve, style = STYLES[chosen.style]
                ticks = self.actions.tempos[chosen.tempo]
                event = growing.germinate(chosen.slot, chosen.blueprint, ticks=ticks, style=style, curve=curve)
                self._account(chosen.slot, Account(start=(self.history.accuracy or [0.0])[-1]))
                return [event]
            case Op.CULL:
                return [growing.cull(chosen.slot, ticks=chosen.speed, curve=chosen.curve)]
            case Op.FOSSILIZE:
                event = growing.fossilize(chosen.slot)
                self._account(chosen.slot, rest=self.horizon - self.tick)
                return [event]
            case Op.ADVANCE:
                return [growing.advance(chosen.slot)]
            case Op.SET_ALPHA:
                return [growing.set_alpha(chosen.slot, chosen.target, ticks=chosen.speed, curve=chosen.curve)]

    def _account(self, slot: str, account: Account | None = None, **changes: int) -> None:
        k = list(self.growing.slots).index(slot)
        self.accounts[k] = (account or self.accounts[k])._replace(**changes)

    def against(self, decision: Sequence[int]) -> list[str]:
        """Return the Governor's reasons to veto an action; an empty list allows it."""
        if self.guard is None:
            return []
        chosen, parameters = self.space.choose(decision), self.host_parameters + self.seed_parameters(OCCUPIED)
        if decision[0] == Op.GERMINATE:
            slot = self.growing.slots[chosen.slot]
            parameters += get(chosen.blueprint, slot.layout).parameters(slot.width)
        return self.guard.vet(chosen.op, parameters / self.host_parameters)

    def draw_batches(self, samples: int) -> Batches:  # [batches, B], on the generator's device
        """Draw the sample indices of the next epoch; `samples` is the size of each data variant."""
        if self.data_order is not None:
            self.generator.manual_seed(self.data_order(self.seed, self.tick))
        batches = self.habitat.draw_batches(self.training, samples, self.seed, self.generator)
        if self.on_batches is not None:
            self.on_batches(batches)
        return batches

    def follow_batches(
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
        self.ended = True

    @property
    def prices(self) -> Prices:
        """Prices of added parameters and compute in this episode."""
        return self.habitat.prices(self.objective_config, self.seed)

    @property
    def failing(self) -> list[SeedSlot]:
        """Slots whose seed receives no gradient in this episode."""
        return self.habitat.failing(self.slots, self.seed)

    def variants(self) -> list[Variant]:
        """Return the combinations of seeds to validate with; see `Validation`."""
        return variants_to_validate(self.growing.slots, committed_only(self.network), host_only=self.bare)

    def record(self, validation: Validation) -> None:
        """Record a validation of the current host."""
        self.validated = validation
        self.history.loss.append(validation.all_seeds.loss)
        self.history.accuracy.append(validation.all_seeds.accuracy)

    def measure(self) -> Score:
        """Update the objective J from the last validation.

        Returns the score that J is computed from: with all seeds, or at the horizon with the fossilized ones only.
        """
        score = self.validated.committed if self.tick >= self.horizon else self.validated.all_seeds
        self.objective = self.objective_with(score.accuracy)
        return score

    def objective_with(self, accuracy: float) -> float:
        """Return the objective J of the host with its fossilized seeds for a given accuracy in 0 … 1.

        The precision is that of the network, at least float32.
        """
        config, prices = self.objective_config, self.prices
        dtype = torch.promote_types(next(self.network.parameters()).dtype, torch.float32)
        charge: torch.Tensor | float = 0.0
        if config.prices_compute:
            flops = torch.tensor([[self.committed_flops], [self.compute.host]])
            charge = compute_rent(*flops, torch.tensor([prices.compute]))
        parameters = torch.tensor([[self.committed_parameters], [self.host_parameters]])
        measured, price = torch.tensor([accuracy], dtype=dtype), torch.tensor([prices.parameters])
        return objective(measured, *parameters, config, price, charge).item()

    def judge(self, result: EpochResult | None) -> Verdict:
        """Return the Governor's verdict on a host epoch. `result` is None if the host ran out of memory."""
        if self.failure is not None:
            return self.guard.give_up(self.failure)
        training, validation = result
        stats = (training.host_gradient, *training.seed_gradients)
        # With loss scaling, gradients overflow fp16 occasionally, and the optimizer skips those steps.
        gradients = () if self.scaler.is_enabled() else tuple(one.norm for one in stats)
        alphas = [slot.alpha_now if slot.blended else 0.0 for slot in self.slots]
        reading = Reading(validation.all_seeds.loss, training.loss, gradients)
        return self.guard.judge(reading, training.skipped_steps, alphas)

    def keep(self) -> None:
        """Take a snapshot of the current host for a later rollback."""
        self.guard.keep(self._host_state())

    def restore(self, ended: bool, cause: str) -> list[SeedEvent]:
        """Roll the host back to its last snapshot and cull its live seeds; the tick count still moves on by one.

        Args:
            ended: True to end the episode.
            cause: Reason for the culls, for the events.

        Returns one event for each slot whose stage differs from its stage before the rollback, so that the sequence of
        events stays complete.
        """
        before = [self.growing.standing(slot.name) for slot in self.slots]
        tick, factor = self.tick, self.lr_factor * self.guard.config.lr_factor
        # A copy: optimizer state loaded from a view would keep the snapshot's whole memory alive.
        self._load_host(self.guard.snapshot.copy())
        self.tick, self.lr_factor, self.ended = tick + 1, factor, ended
        self._set_options()
        self.growing.cull_live(cause)
        now = zip(before, self.slots, strict=True)
        return [replace(was, after=slot.stage, cause=cause) for was, slot in now if was.before is not slot.stage]

    def finish_tick(self, result: EpochResult, hold: bool = False) -> list[SeedEvent]:
        """Record the result of a host epoch and advance the lifecycle of the seeds; with `hold`, no stage advances."""
        training, validation = result
        self.history.train_loss.append(training.loss)
        self.history.train_accuracy.append(training.accuracy)
        self.host_gradient = training.host_gradient
        self.skipped_steps += training.skipped_steps
        self.record(validation)
        self.tick += 1
        contributions = dict(zip(self.growing.slots, validation.contributions, strict=True))
        gradients = dict(zip(self.growing.slots, training.seed_gradients, strict=True))
        return self.growing.tick(contributions, gradients, hold=hold)

    def seed_parameters(self, stages: frozenset[Stage]) -> int:
        """Return the number of parameters of all seeds in one of `stages`."""
        return sum(count_parameters(slot.seed) for slot in self.slots if slot.stage in stages)

    @property
    def committed_parameters(self) -> int:
        """Number of parameters of the host and its fossilized seeds."""
        return self.host_parameters + self.seed_parameters(frozenset({Stage.FOSSILIZED}))

    @property
    def committed_flops(self) -> int:
        """FLOPs of the forward pass for one sample through the host and its fossilized seeds."""
        kept = [slot for slot in self.slots if slot.stage is Stage.FOSSILIZED]
        return self.compute.host + sum(self.compute.of(slot) for slot in kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, in types that `torch.load(weights_only=True)` accepts."""
        guard = self.guard.state_dict() if self.guard is not None else None
        return self._host_state() | {"ended": self.ended, "guard": guard}

    def _host_state(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "tick": self.tick,
            "last_op": int(self.last_op),
            "objective": self.objective,
            "accounts": [list(account) for account in self.accounts],
            "history": {name: list(values) for name, values in vars(self.history).items()},
            "validated": as_state(self.validated) if self.validated else None,
            "host_gradient": list(self.host_gradient) if self.host_gradient else None,
            "scaler": self.scaler.state_dict(),
            "skipped_steps": self.skipped_steps,
            "lr_factor": self.lr_factor,
            "growing": self.growing.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`. Raises ValueError if it is invalid for this host."""
        check_host(state, self.horizon, len(self.slots))
        check_parts("a host", state, ("ended", "guard"))
        if state["guard"] is not None:
            check_guard(state["guard"], self.horizon, len(self.slots))
        self.reset(state["seed"])
        if state["guard"] is not None:
            self._load_host(state["guard"]["snapshot"])  # a trial: reports an invalid snapshot now
        self._load_host(state)
        self.ended = bool(state["ended"])
        if self.guard is not None:
            if state["guard"] is not None:
                self.guard.load_state_dict(state["guard"])
            else:  # the Governor was disabled, so this is the first state to snapshot
                self.keep()

    def _load_host(self, state: dict[str, Any]) -> None:
        self._begin()
        self.seed = state["seed"]
        self.tick, self.last_op, self.objective = state["tick"], Op(state["last_op"]), state["objective"]
        self.accounts = check_accounts(state.get("accounts"), self.horizon, len(self.slots))
        self.history = History(**{name: list(values) for name, values in state["history"].items()})
        self.validated = check_validation(state["validated"], len(self.slots))
        self.host_gradient = GradientStats(*state["host_gradient"]) if state["host_gradient"] else None
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.skipped_steps, self.lr_factor = state["skipped_steps"], state["lr_factor"]
        self.growing.load_state_dict(state["growing"])
        self._set_options()
