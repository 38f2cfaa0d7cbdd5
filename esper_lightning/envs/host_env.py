"""One environment: a host network in training, with its seeds, measurements and optimizer. K slots."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from esper_lightning.envs.actions import ActionConfig, ActionSpace, Op
from esper_lightning.envs.family import HostContext
from esper_lightning.envs.flops import HostFlops, positions_per_parameter
from esper_lightning.envs.governor import EpochStats, HostMonitor, Judgement, Verdict, veto_reasons
from esper_lightning.envs.measurements import EpochResult, History, LossAndScore, Validation
from esper_lightning.envs.rewards import SMALLEST_HOST, HostStep, ObjectiveConfig, SlotStatus, objective
from esper_lightning.envs.snapshot import clone_tensors, pack, unpack
from esper_lightning.growth.blueprints import initialise
from esper_lightning.growth.counterfactual import SeedVariant
from esper_lightning.growth.depth import DepthSlot, depths
from esper_lightning.growth.gates import GradientStats, LifecycleConfig
from esper_lightning.growth.growing_network import GrowingNetwork, SeedMeasurements
from esper_lightning.growth.lifecycle import SeedEvent, count_parameters, unchanged_stage
from esper_lightning.growth.param_groups import host_groups, nominal_lr
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import Batches, draw_augment_params

if TYPE_CHECKING:
    from esper_lightning.envs.config import EnvConfig
    from esper_lightning.envs.observation import HostDescription


class GrowthRecord:
    """A growing network with the record of its training, as controllers see it.

    It does not train the network: `HostEnv` does in an environment, and the callback `Grow` in a training of your own.
    Both call `apply` before an epoch and `record_epoch` after it. `flops` are those of the host.
    """

    def __init__(
        self,
        growing: GrowingNetwork,
        space: ActionSpace,
        *,
        actions: ActionConfig,
        objective: ObjectiveConfig,
        flops: HostFlops,
    ) -> None:
        self.growing, self.space, self.actions, self.flops = growing, space, actions, flops
        self.objective_config = objective
        seeds = sum(slot.size for slot in growing.slots.values())
        self.host_parameters = count_parameters(growing.module) - seeds  # of the network without its seeds
        self.description: HostDescription | None = None  # made when it is first observed
        self._clear()

    def _clear(self) -> None:
        self.tick = 0  # recorded epochs
        self.last_op = Op.WAIT
        self.history = History()  # metrics of each epoch
        self.score_at_germination = [0.0 for _ in self.growing.slots]  # of the network, for the last seed of a slot
        # Last measured contribution of each blueprint that was blended in a slot, in points, by name, [K].
        self.trials: list[dict[str, float]] = [{} for _ in self.growing.slots]
        self.validated: Validation | None = None
        self.host_gradient: GradientStats | None = None
        self.stopped = False  # before the horizon
        self.skipped_steps = 0  # since the start, because gradients overflowed fp16

    @property
    def horizon(self) -> int:
        return self.growing.horizon

    @property
    def ended(self) -> bool:
        """True if nothing can grow any more, because the training was stopped before the horizon."""
        return self.stopped

    @property
    def slots(self) -> list[SeedSlot]:
        return list(self.growing.slots.values())

    @property
    def records(self) -> list[SeedMeasurements]:
        """Measurements of the seed in each slot, [K]."""
        return list(self.growing.measurements.values())

    @property
    def lifecycle(self) -> LifecycleConfig:
        return self.growing.lifecycle

    @property
    def lr_share(self) -> float:
        """Learning rate of the coming epoch as a share of its nominal value, at most 1; 1 if the optimizer has none."""
        group = host_groups(self.growing.optimizer)[0]
        if group["lr"] is None:
            return 1.0
        nominal = nominal_lr(group)
        return min(1.0, float(group["lr"]) / nominal) if nominal else 0.0

    @property
    def price(self) -> float:
        return self.objective_config.price

    @property
    def flops_left(self) -> float | None:
        """FLOPs of training that are left until the horizon. None: not limited."""
        return None

    def targets_per_parameter(self, parameters: int) -> float:
        """Return on how many targets for each of its parameters a network of this size is trained by the FLOPs left."""
        # A text has a target at every position, an image one for all its pixels. Positions are those at depth slots.
        assert self.flops_left is not None, "it has a budget"
        stacks = [slot for slot in self.slots if isinstance(slot, DepthSlot)]
        sizes = [(n, slot.seed_parameters()) for slot in stacks for n in self.flops.positions[slot.name]]
        positions = sum(n * size for n, size in sizes) / max(1, sum(size for _, size in sizes))
        share = min(1.0, self.flops.targets / max(1.0, positions))
        return share * positions_per_parameter(max(1.0, self.flops_left), parameters)

    def apply(self, action: Sequence[int]) -> list[SeedEvent]:
        """Execute one action, an index per head. Raises ValueError if the lifecycle forbids it."""
        chosen, growing = self.space.decode(action), self.growing
        self.last_op = Op(action[0])
        match self.last_op:
            case Op.WAIT:
                return []
            case Op.GERMINATE:
                ticks = self.actions.tempos[chosen.tempo]
                event = growing.germinate(chosen.slot, chosen.blueprint, ticks=ticks)
                k = list(growing.slots).index(chosen.slot)
                self.score_at_germination[k] = (self.history.score or [0.0])[-1]
                return [event]
            case Op.CULL:
                return [growing.cull(chosen.slot)]
            case Op.FOSSILIZE:
                return [growing.fossilize(chosen.slot)]

    def refusal_reasons(self, action: Sequence[int]) -> list[str]:
        """Return the Governor's reasons to veto an action; an empty list allows it."""
        return []

    def record_validation(self, validation: Validation) -> None:
        """Record a validation of the current host."""
        self.validated = validation
        self.history.loss.append(validation.all_seeds.loss)
        self.history.score.append(validation.all_seeds.score)

    def record_epoch(
        self, result: EpochResult, contributions: Mapping[str, float], hold_stages: bool = False
    ) -> list[SeedEvent]:
        """Record the result of an epoch and advance the lifecycle of the seeds; `hold_stages` keeps their stages.

        `contributions` are those of blended seeds that are judged, in points, by slot.
        """
        training, validation = result
        self.history.train_loss.append(training.loss)
        self.history.train_score.append(training.score)
        self.host_gradient = training.host_gradient
        self.skipped_steps += training.skipped_steps
        self.record_validation(validation)
        self.tick += 1
        for slot, trials in zip(self.slots, self.trials, strict=True):
            if slot.blended and slot.is_judged and slot.blueprint is not None:
                trials[slot.blueprint] = contributions[slot.name]
        gradients = dict(zip(self.growing.slots, training.seed_gradients, strict=True))
        return self.growing.end_epoch(contributions, gradients, hold=hold_stages)

    def seed_parameters(self, stages: frozenset[Stage]) -> int:
        """Return the number of parameters of all seeds in one of `stages`."""
        return sum(slot.size for slot in self.slots if slot.stage in stages)

    @property
    def fossilized_parameters(self) -> int:
        """Number of parameters of the host and its fossilized seeds."""
        return self.host_parameters + self.seed_parameters(frozenset({Stage.FOSSILIZED}))

    def record_state(self) -> dict[str, Any]:
        """Return the record, in types that `torch.load(weights_only=True)` accepts."""
        return {
            "tick": self.tick,
            "last_op": int(self.last_op),
            "score_at_germination": list(self.score_at_germination),
            "trials": [dict(trials) for trials in self.trials],
            "history": {name: list(values) for name, values in vars(self.history).items()},
            "validated": self.validated.pairs() if self.validated else None,
            "host_gradient": list(self.host_gradient) if self.host_gradient else None,
            "skipped_steps": self.skipped_steps,
        }

    def load_record_state(self, state: Mapping[str, Any]) -> None:
        """Restore the record of a training from `record_state`."""
        self.tick, self.last_op = state["tick"], Op(state["last_op"])
        self.score_at_germination = list(state["score_at_germination"])
        self.trials = [dict(trials) for trials in state["trials"]]
        self.history = History(**{name: list(values) for name, values in state["history"].items()})
        self.validated = Validation.from_pairs(state["validated"]) if state["validated"] else None
        self.host_gradient = GradientStats(*state["host_gradient"]) if state["host_gradient"] else None
        self.skipped_steps = state["skipped_steps"]


class StepStart(NamedTuple):
    """State of an environment before the action of a step, and the op of that action."""

    op: Op
    ended: bool
    validation: Validation
    objective: float


class HostEnv(GrowthRecord):
    """An environment whose episode is the training of one host network: its record, and what trains and prices it.

    An episode depends on the RNG seed of `reset` and on the actions alone. An environment step is one host epoch. The
    `network` is on the device and has empty slots; hosts of one `architecture` and depth can be batched.
    """

    def __init__(
        self,
        network: nn.Module,
        space: ActionSpace,
        context: HostContext,
        *,
        config: "EnvConfig",
        device: torch.device,
        flops: HostFlops,
        architecture: str = "",
    ) -> None:
        self.network, self.device = network, device
        self.monitor: HostMonitor | None = None  # of the Governor. None: the host is not watched
        self.architecture = architecture
        self.longest = config.horizon
        self.context, self.training = context, context.training
        self.optimizer = self.training.make_optimizer(network)
        self.generator = torch.Generator(self.device)
        self.loss_scale = self.training.make_loss_scale(self.device)
        growing = GrowingNetwork(
            network,
            self.optimizer,
            horizon=context.horizon,
            lifecycle=config.lifecycle,
            generator=self.generator,
        )
        super().__init__(growing, space, actions=config.actions, objective=config.objective, flops=flops)
        # Function of the episode's RNG seed and the tick, which returns the RNG seed of the epoch's minibatches. None:
        # they depend on everything drawn before, such as the weights of seeds.
        self.data_order: Callable[[int, int], int] | None = None
        self.on_batches: Callable[[Batches], None] | None = None  # called with the minibatches of each host epoch
        self.epochs: int | None = None  # over which the learning rate follows its schedule. None: the horizon
        self.rng_seed = 0

    @property
    def horizon(self) -> int:
        return self.context.horizon

    @property
    def ended(self) -> bool:
        """True if the episode was stopped, or is over and shorter than the longest ones; nothing can grow any more."""
        return self.stopped or (self.horizon < self.longest and self.tick >= self.horizon)

    def _clear(self) -> None:
        super()._clear()
        self.objective = 0.0  # J at the last measurement
        self.flops_spent = 0  # by the training of the episode, where `training.flops` limits it
        self.failure: str | None = None  # out-of-memory message of the last host epoch

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
    def kind(self) -> str:
        """Architecture and depths, which hosts in one stack have in common."""
        return f"{self.architecture} {depths(self.slots)}"

    @property
    def structure(self) -> tuple[Hashable, ...]:
        """Kind of the host and what its slots compute: all in which compiled code of one pool may differ."""
        return self.kind, self.device, *((s.blueprint, s.isolated, s.blended, s.live) for s in self.slots)

    @property
    def lr_share(self) -> float:
        """Learning rate of the coming epoch as a share of the configured one, 0 to 1."""
        return self.training.lr_share(self.tick / (self.horizon if self.epochs is None else max(1, self.epochs)))

    def _set_optimizer_options(self) -> None:
        """Set the optimizer options of the coming epoch in this run, in place of those of a loaded state."""
        options = self.training.group_options()
        for group in self.optimizer.param_groups:
            group.update(options, lr=options["lr"] * self.lr_share)

    # One step, in this order: begin_step, apply, an epoch of training and validation by the executor, finish_step,
    # update_objectives, reward_step.

    def begin_step(self, op: Op) -> None:
        """Remember the state before the action of a step."""
        assert self.validated is not None, "an episode begins with a validation"
        self._step_start = StepStart(op, self.ended, self.validated, self.objective)

    @property
    def flops_left(self) -> float | None:
        return None if self.training.flops is None else self.horizon * self.training.flops - self.flops_spent

    @property
    def _batch_flops(self) -> int:
        return self.flops.of_step(self.slots) * self.training.batch_size

    def num_batches(self, samples: int) -> int:
        """Return the number of minibatches in the coming epoch; `samples` is the size of each data variant."""
        if self.training.flops is None:
            return self.training.steps_per_epoch(samples)
        # What earlier epochs left is added, and epochs that were rolled back have cost theirs.
        return max(1, int(((self.tick + 1) * self.training.flops - self.flops_spent) // self._batch_flops))

    def draw_batches(self, samples: int) -> Batches:  # [batches, B], on the generator's device
        """Draw the sample indices of the coming epoch; `samples` is the size of each data variant."""
        if self.data_order is not None:
            self.generator.manual_seed(self.data_order(self.rng_seed, self.tick))
        count, size, generator = self.num_batches(samples), self.training.batch_size, self.generator
        if self.training.flops is not None:
            self.flops_spent += count * self._batch_flops
            if self.monitor is not None:
                self.monitor.steps_per_epoch = count
        passes = -(-size * count // samples)  # shuffled ones over the data
        orders = [torch.randperm(samples, generator=generator, device=generator.device) for _ in range(passes)]
        indices = torch.cat(orders)[: size * count].view(-1, size) + self.context.variant_index * samples
        batches = Batches(indices, draw_augment_params(self.training.augment, indices.shape, generator))
        if self.on_batches is not None:
            self.on_batches(batches)
        return batches

    @property
    def failing_slots(self) -> list[SeedSlot]:
        """Slots whose seed receives no gradient in this episode; copies of blocks never fail."""
        context = self.context.context
        if not context.seeds_may_fail:
            return []
        grown = [slot for slot in self.slots if slot.occupied and slot.is_judged]
        return [slot for slot in grown if context.seed_fails(self.rng_seed, slot.name, slot.blueprint or "")]

    def variants(self) -> list[SeedVariant]:
        """Return the combinations of seeds [V] to validate with, in the order that `unpack_validations` expects.

        Equal ones are computed once; the one without a seed that is not judged is the whole one.
        """
        slots = self.slots
        blended = frozenset(slot.name for slot in slots if slot.blended)
        judged = frozenset(slot.name for slot in slots if slot.is_judged)
        fossilized = frozenset(slot.name for slot in slots if slot.stage is Stage.FOSSILIZED)
        return [blended, *(blended - ({slot.name} & judged) for slot in slots), fossilized]

    def finish_step(self, result: EpochResult | None, judged: bool = True) -> tuple[list[SeedEvent], Judgement | None]:
        """Record the result of a host epoch and advance the seeds, or roll the host back, which must then be validated.

        The tick count moves on in any case. `result` is None if the episode has ended, or if the host ran out of
        memory. Returns the stage changes of seeds, and the Governor's judgement if the host is `judged`.
        """
        if self.ended:
            self.tick += 1
            return [], None
        judgement = None
        if judged and self.monitor is not None:
            judgement = self._judge(self.monitor, result)
            if judgement.outcome.diverged:
                return self.roll_back(judgement.outcome is Verdict.END, judgement.outcome.value), judgement
        assert result is not None, "only a failure leaves no result"
        measured = zip(self.slots, result.validation.contributions, strict=True)
        contributions = {slot.name: points for slot, points in measured if slot.is_judged}
        is_held = judgement is not None and judgement.outcome is Verdict.SUSPICIOUS
        events = self.record_epoch(result, contributions, is_held)
        if self.training.lr_schedule != "constant":
            self._set_optimizer_options()
        return events, judgement

    @property
    def measured(self) -> LossAndScore:
        """Loss and score by which J is measured: of all seeds, or of the fossilized ones at the horizon."""
        assert self.validated is not None, "an episode begins with a validation"
        return self.validated.fossilized if self.tick >= self.horizon else self.validated.all_seeds

    @property
    def price(self) -> float:
        return self.context.price

    @property
    def score_dtype(self) -> torch.dtype:
        """Data type of losses, scores and objectives: that of the network, at least float32."""
        return torch.promote_types(next(self.network.parameters()).dtype, torch.float32)

    def reward_step(self, diverged: bool) -> HostStep:
        """Return the record of the finished step from which its reward is computed, after `update_objectives`.

        `diverged`: the Governor has rolled the host back, or ended its episode, in this step.
        """
        start, before, after = self._step_start, self._step_start.validation, self.validated
        assert after is not None, "an episode begins with a validation"
        at_horizon, host = self.tick >= self.horizon, max(self.host_parameters, SMALLEST_HOST)
        # With fossilized seeds only, the rent is the same, so that J differs by the score.
        fossilized_now = self.objective - after.all_seeds.score + after.fossilized.score
        return HostStep(
            op=start.op.name,
            already_ended=start.ended,
            at_horizon=at_horizon,
            diverged=diverged,
            objective_before=start.objective,
            objective=self.objective,
            fossilized_objective_before=start.objective - before.all_seeds.score + before.fossilized.score,
            fossilized_objective=self.objective if at_horizon else fossilized_now,
            score_before=before.all_seeds.score,
            score=after.all_seeds.score,
            fossilized_score=after.fossilized.score,
            loss=after.all_seeds.loss,
            slots=tuple(
                SlotStatus(slot.stage, slot.ticks_in_stage, slot.age, points, slot.size, slot.size / host)
                for slot, points in zip(self.slots, after.contributions, strict=True)
            ),
        )

    # The Governor

    def refusal_reasons(self, action: Sequence[int]) -> list[str]:
        """Return the Governor's reasons to veto an action; an empty list allows it."""
        return [] if self.monitor is None else veto_reasons(Op(action[0]).name, self.monitor.governor_state)

    def _judge(self, monitor: HostMonitor, result: EpochResult | None) -> Judgement:
        """Return the monitor's judgement on a host epoch; `result` is None if the host ran out of memory."""
        if self.failure is not None:
            return monitor.judge_failure(self.failure)
        assert result is not None, "only a failure leaves no result"
        training, validation = result
        # With loss scaling, gradients overflow fp16 occasionally, and the optimizer skips those steps.
        stats = (training.host_gradient, *training.seed_gradients) if self.loss_scale is None else ()
        epoch_stats = EpochStats(validation.all_seeds.loss, training.loss, tuple(stat.norm for stat in stats))
        alphas = [slot.alpha_now if slot.blended else 0.0 for slot in self.slots]
        return monitor.judge(epoch_stats, training.skipped_steps, alphas)

    def take_snapshot(self) -> None:
        """Take a snapshot of the current host for a later rollback."""
        assert self.monitor is not None, "only watched hosts have snapshots"
        self.monitor.take_snapshot(self._host_state())

    def roll_back(self, stop: bool, cause: str) -> list[SeedEvent]:
        """Roll the host back to its last snapshot and cull its live seeds; the tick count still moves on by one.

        `stop`: the Governor gives the host up for the rest of the episode. Returns one event, with the cause, for each
        slot whose stage changes.
        """
        assert self.monitor is not None, "only watched hosts have snapshots"
        before = zip(self.slots, self.records, strict=True)
        events = [unchanged_stage(slot, cause)._replace(contribution=record.contribution) for slot, record in before]
        tick, flops_spent = self.tick, self.flops_spent
        # A copy: optimizer state loaded from a view would keep the snapshot's whole memory alive.
        self._load_host(self.monitor.snapshot.copy())
        self.tick, self.stopped, self.flops_spent = tick + 1, stop, flops_spent
        self._set_optimizer_options()
        self.growing.cull_live_seeds(cause)
        pairs = zip(events, self.slots, strict=True)
        return [event._replace(after=slot.stage) for event, slot in pairs if event.before is not slot.stage]

    # Saved state

    def packed_state(self) -> dict[str, Any]:
        """Return a copy of the complete state, packed: plain data that `torch.load(weights_only=True)` accepts."""
        state = self._host_state()
        monitor = self.monitor.state_dict() if self.monitor is not None else None  # `pack` copies its views
        return pack(state | {"ended": self.stopped, "monitor": monitor})

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the complete state."""
        return unpack(self.packed_state())

    def _host_state(self) -> dict[str, Any]:
        return self.record_state() | {
            "rng_seed": self.rng_seed,
            "objective": self.objective,
            "flops_spent": self.flops_spent,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
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
        """Restore the host of a state, its network, optimizer and records, in place of the present one."""
        self._clear()
        self.rng_seed = state["rng_seed"]
        self.load_record_state(state)
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        self.objective, self.flops_spent = state["objective"], state["flops_spent"]
        self.growing.load_state_dict(state["growing"])
        self._set_optimizer_options()  # in place of the saved ones


def objectives(envs: Sequence[HostEnv], scores: Sequence[float]) -> list[float]:
    """Return the objective J of each host with its fossilized seeds for a given score of each."""
    parameters = torch.tensor([env.fossilized_parameters for env in envs])
    hosts, prices = torch.tensor([env.host_parameters for env in envs]), torch.tensor([env.price for env in envs])
    return objective(torch.tensor(scores, dtype=envs[0].score_dtype), parameters, hosts, prices).tolist()


def update_objectives(envs: Sequence[HostEnv]) -> list[LossAndScore]:
    """Update J of each host from its last validation. Returns the loss and score that J is measured by."""
    measured = [env.measured for env in envs]
    for env, value in zip(envs, objectives(envs, [score for _, score in measured]), strict=True):
        env.objective = value
    return measured
