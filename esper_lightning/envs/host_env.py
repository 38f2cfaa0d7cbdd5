"""One environment: a host in training, its optimizer, its random numbers and what has been measured of it."""

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
    """A host whose training is an episode. What happens depends on the seed of `reset` and on the actions alone.

    Args:
        network: A host with empty slots, on its device.
        space: The choices that actions index.
        habitat: What it lives in, until it joins another one.
        lifecycle, actions, objective: Settings.
        horizon: Ticks T in an episode.
        device: Where the network is.
        laps: Of the time that is spent on this host.
        guard: Watches over it. None: nobody does.
        bare: Validate it without any seed, too.
        compute: What its forward pass costs. None: nobody asks.
        kind: Its architecture: hosts of one kind can be stacked.
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
        """From the next reset on it is a host of this habitat."""
        self.habitat = habitat
        self.training = habitat.training
        if self.guard is not None:
            self.guard.chance = habitat.chance

    def _begin(self) -> None:
        self.tick = 0
        self.last_op = Op.WAIT
        self.history = History()
        self.objective = 0.0  # J as last measured
        self.accounts = [Account() for _ in self.growing.slots]
        self.validated: Validation | None = None  # as last validated
        self.host_gradient: GradientStats | None = None
        self.skipped_steps = 0  # since the episode began: their gradients left fp16's range
        self.ended = False  # before the horizon: nothing happens to this host any more
        self.failure: str | None = None  # why its last host epoch could not be finished
        self.lr_factor = 1.0

    @property
    def slots(self) -> list[SeedSlot]:
        return list(self.growing.slots.values())

    @property
    def records(self) -> list[SeedRecord]:
        """What is known of the seed in each slot."""
        return list(self.growing.records.values())

    @property
    def lifecycle(self) -> LifecycleConfig:
        return self.growing.lifecycle

    def reset(self, seed: int) -> None:
        """Starts a new episode in place: fresh weights, empty slots, no momentum."""
        self.seed = seed
        self.generator.manual_seed(seed)
        self.scaler = self.training.make_scaler(self.device)
        self.growing.clear()  # first: an old seed would draw from the generator and change what follows
        initialise(self.network, self.generator)
        self._begin()
        self._set_options()
        if self.guard is not None:
            self.guard.begin()

    def _set_options(self) -> None:
        """Learning rates and the like are this run's settings, not those of a state that was loaded."""
        for group in self.optimizer.param_groups:
            options = self.training.options(group["name"])
            group.update(options, lr=options["lr"] * self.lr_factor)
        seed = self.training.options("seed")
        self.growing.seed_options = seed | {"lr": seed["lr"] * self.lr_factor}

    def apply(self, decision: Sequence[int]) -> list[SeedEvent]:
        """Carries out one action, a number per head. Raises ValueError if the lifecycle forbids it."""
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
        """The Governor's reasons against an action; empty: none."""
        if self.guard is None:
            return []
        chosen, parameters = self.space.choose(decision), self.host_parameters + self.seed_parameters(OCCUPIED)
        if decision[0] == Op.GERMINATE:
            slot = self.growing.slots[chosen.slot]
            parameters += get(chosen.blueprint, slot.layout).parameters(slot.width)
        return self.guard.vet(chosen.op, parameters / self.host_parameters)

    def draw_batches(self, samples: int) -> Batches:  # [batches, B], on the generator's device
        """The next tick's minibatches, with so many samples in each variant of the data."""
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
        """Fixes and watches the minibatches of the host epochs to come; without arguments: no longer.

        Args:
            data_order: RNG seed of a host epoch's minibatches, from the episode's RNG seed and the tick. None: they
                depend on all that was drawn before, as the weights of seeds.
            on_batches: Called with the minibatches of each host epoch, after the action and before training.
        """
        self.data_order, self.on_batches = data_order, on_batches

    def end(self) -> None:
        """Ends the episode before the horizon: nothing happens to this host until it is reset."""
        self.ended = True

    @property
    def prices(self) -> Prices:
        """Prices of growth in this episode."""
        return self.habitat.prices(self.objective_config, self.seed)

    @property
    def failing(self) -> list[SeedSlot]:
        """Slots whose seed gets no gradient."""
        return self.habitat.failing(self.slots, self.seed)

    def variants(self) -> list[Variant]:
        """Combinations of seeds to validate with: see `Validation`."""
        return variants_to_validate(self.growing.slots, committed_only(self.network), host_only=self.bare)

    def record(self, validation: Validation) -> None:
        """Takes in a validation of the host as it is now."""
        self.validated = validation
        self.history.loss.append(validation.all_seeds.loss)
        self.history.accuracy.append(validation.all_seeds.accuracy)

    def measure(self) -> Score:
        """Updates the objective J from the last validation.

        Returns the score that J was computed from: with all seeds, or at the horizon with the fossilized ones alone.
        """
        score = self.validated.committed if self.tick >= self.horizon else self.validated.all_seeds
        self.objective = self.objective_with(score.accuracy)
        return score

    def objective_with(self, accuracy: float) -> float:
        """Objective J of the host and its fossilized seeds if they had this accuracy.

        Computed in the network's precision, at least float32.
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
        """The Governor's word on a host epoch, before anything else is made of it; None: it did not take place."""
        if self.failure is not None:
            return self.guard.give_up(self.failure)
        training, validation = result
        stats = (training.host_gradient, *training.seed_gradients)
        # Scaled gradients leave half precision's range now and then, and then nothing is learned from them.
        gradients = () if self.scaler.is_enabled() else tuple(one.norm for one in stats)
        alphas = [slot.alpha_now if slot.blended else 0.0 for slot in self.slots]
        reading = Reading(validation.all_seeds.loss, training.loss, gradients)
        return self.guard.judge(reading, training.skipped_steps, alphas)

    def keep(self) -> None:
        """Takes a snapshot of the host as it is now."""
        self.guard.keep(self._host_state())

    def restore(self, ended: bool, cause: str) -> list[SeedEvent]:
        """Makes the host what it was at its last snapshot, without the seeds that were alive; time is not given back.

        Args:
            ended: Is the episode over?
            cause: Of the seeds' end, for their events.

        Returns a change for every slot that is not in the stage any more that it was in before, so that whoever follows
        the events knows where each slot is.
        """
        before = [self.growing.standing(slot.name) for slot in self.slots]
        tick, factor = self.tick, self.lr_factor * self.guard.config.lr_factor
        # Of a view the optimizer would keep the whole snapshot's memory, again and again.
        self._load_host(self.guard.snapshot.copy())
        self.tick, self.lr_factor, self.ended = tick + 1, factor, ended
        self._set_options()
        self.growing.cull_live(cause)
        now = zip(before, self.slots, strict=True)
        return [replace(was, after=slot.stage, cause=cause) for was, slot in now if was.before is not slot.stage]

    def finish_tick(self, result: EpochResult, hold: bool = False) -> list[SeedEvent]:
        """Takes in what the host epoch showed, and lets time pass for the seeds; with `hold` none of them advances."""
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
        """Parameters of the seeds that are in one of `stages`."""
        return sum(count_parameters(slot.seed) for slot in self.slots if slot.stage in stages)

    @property
    def committed_parameters(self) -> int:
        """Parameters of the host and of what is kept for good."""
        return self.host_parameters + self.seed_parameters(frozenset({Stage.FOSSILIZED}))

    @property
    def committed_flops(self) -> int:
        """Floating-point operations of a sample's forward pass through the host and what is kept for good."""
        kept = [slot for slot in self.slots if slot.stage is Stage.FOSSILIZED]
        return self.compute.host + sum(self.compute.of(slot) for slot in kept)

    def state_dict(self) -> dict[str, Any]:
        """Everything that continuation needs, in types that `torch.load(weights_only=True)` accepts."""
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
        """Continues where `state_dict` was taken. Raises ValueError if no such host can have been there."""
        check_host(state, self.horizon, len(self.slots))
        check_parts("a host", state, ("ended", "guard"))
        if state["guard"] is not None:
            check_guard(state["guard"], self.horizon, len(self.slots))
        self.reset(state["seed"])
        if state["guard"] is not None:
            self._load_host(state["guard"]["snapshot"])  # what could not be restored is found out now
        self._load_host(state)
        self.ended = bool(state["ended"])
        if self.guard is not None:
            if state["guard"] is not None:
                self.guard.load_state_dict(state["guard"])
            else:  # nobody watched so far: this is the first state that is known
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
