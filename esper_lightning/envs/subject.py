"""A network that grows while it trains, as controllers see it: its seeds, measurements, prices and possible actions."""

from collections.abc import Mapping, Sequence
from typing import Any

from esper_lightning.envs.flops import HostFlops
from esper_lightning.envs.measurements import EpochResult, History, Validation, read_validation, validation_state
from esper_lightning.envs.spaces.actions import STYLES, ActionConfig, ActionSpace, Op
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.gradient_stats import GradientStats
from esper_lightning.growth.growing_network import GrowingNetwork, SeedMeasurements
from esper_lightning.growth.lifecycle import SeedEvent, count_parameters
from esper_lightning.growth.param_groups import host_groups, nominal_lr
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import ObjectiveConfig, Prices, SeedAccount


class Subject:
    """A growing network with the record of its training.

    It does not train the network: `HostEnv` does in an environment, and the callback `Grow` in a training of your own.
    Both call `apply` before an epoch and `record_epoch` after it.

    Args:
        growing: Network with slots and its optimizer.
        space: Choices that the numbers of an action index.
        actions, objective: Settings.
        flops: FLOPs of the host. None: compute has no price.

    Attributes:
        host_parameters: Number of parameters of the network without its seeds.
        stopped: True if the training was stopped before the horizon.
        tick: Number of recorded epochs.
        history: Metrics of each epoch.
        accounts: Record of the seed in each slot for rewards, [K].
        trials: Last measured contribution of each blueprint that was blended in a slot, in accuracy points, by name,
            [K].
    """

    def __init__(
        self,
        growing: GrowingNetwork,
        space: ActionSpace,
        *,
        actions: ActionConfig,
        objective: ObjectiveConfig,
        flops: HostFlops | None = None,
    ) -> None:
        self.growing = growing
        self.space = space
        self.actions = actions
        self.objective_config = objective
        self.flops = flops
        seeds = sum(count_parameters(slot.seed) for slot in growing.slots.values())
        self.host_parameters = count_parameters(growing.module) - seeds
        self._clear()

    def _clear(self) -> None:
        self.tick = 0
        self.last_op = Op.WAIT
        self.history = History()
        self.accounts = [SeedAccount() for _ in self.growing.slots]
        self.trials: list[dict[str, float]] = [{} for _ in self.growing.slots]
        self.validated: Validation | None = None  # of the last validation
        self.host_gradient: GradientStats | None = None
        self.stopped = False
        self.skipped_steps = 0  # since the start, because gradients overflowed fp16

    @property
    def horizon(self) -> int:
        """Total number of epochs of the training."""
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
        """Learning rate of the coming epoch as a share of its nominal value, at most 1; 0 if both are 0."""
        group = host_groups(self.growing.optimizer)[0]
        nominal = nominal_lr(group)
        return min(1.0, float(group["lr"]) / nominal) if nominal else 0.0

    @property
    def prices(self) -> Prices:
        """Prices of added parameters and compute."""
        return Prices(self.objective_config.price, self.objective_config.compute_price)

    def apply(self, action: Sequence[int]) -> list[SeedEvent]:
        """Execute one action, an index per head. Raises ValueError if the lifecycle forbids it."""
        chosen, growing = self.space.decode(action), self.growing
        self.last_op = Op(action[0])
        match self.last_op:
            case Op.WAIT:
                return []
            case Op.GERMINATE:
                curve, style = STYLES[chosen.style]
                ticks = self.actions.tempos[chosen.tempo]
                event = growing.germinate(chosen.slot, chosen.blueprint, ticks=ticks, style=style, curve=curve)
                self._update_account(
                    chosen.slot, SeedAccount(accuracy_at_germination=(self.history.accuracy or [0.0])[-1])
                )
                return [event]
            case Op.CULL:
                return [growing.cull(chosen.slot)]
            case Op.FOSSILIZE:
                event = growing.fossilize(chosen.slot)
                self._update_account(chosen.slot, ticks_left=self.horizon - self.tick)
                return [event]

    def _update_account(self, slot: str, account: SeedAccount | None = None, **changes: int) -> None:
        k = list(self.growing.slots).index(slot)
        self.accounts[k] = (account or self.accounts[k])._replace(**changes)

    def refusal_reasons(self, action: Sequence[int]) -> list[str]:
        """Return the reasons of an overseer to veto an action; an empty list allows it."""
        return []

    def record_validation(self, validation: Validation) -> None:
        """Record a validation of the current host."""
        self.validated = validation
        self.history.loss.append(validation.all_seeds.loss)
        self.history.accuracy.append(validation.all_seeds.accuracy)

    def record_epoch(self, result: EpochResult, hold_stages: bool = False) -> list[SeedEvent]:
        """Record the result of an epoch and advance the lifecycle of the seeds; `hold_stages` keeps their stages."""
        training, validation = result
        self.history.train_loss.append(training.loss)
        self.history.train_accuracy.append(training.accuracy)
        self.host_gradient = training.host_gradient
        self.skipped_steps += training.skipped_steps
        self.record_validation(validation)
        self.tick += 1
        contributions = dict(zip(self.growing.slots, validation.contributions, strict=True))
        for slot, trials in zip(self.slots, self.trials, strict=True):
            if slot.blended and slot.blueprint is not None:
                trials[slot.blueprint] = contributions[slot.name]
        gradients = dict(zip(self.growing.slots, training.seed_gradients, strict=True))
        is_measured = self.lifecycle.min_potential is not None
        potentials = dict(zip(self.growing.slots, validation.potentials, strict=True)) if is_measured else None
        return self.growing.end_epoch(contributions, gradients, potentials=potentials, hold=hold_stages)

    def seed_parameters(self, stages: frozenset[Stage]) -> int:
        """Return the number of parameters of all seeds in one of `stages`."""
        return sum(count_parameters(slot.seed) for slot in self.slots if slot.stage in stages)

    @property
    def fossilized_parameters(self) -> int:
        """Number of parameters of the host and its fossilized seeds."""
        return self.host_parameters + self.seed_parameters(frozenset({Stage.FOSSILIZED}))

    @property
    def fossilized_flops(self) -> int:
        """FLOPs of the forward pass for one sample through the host and its fossilized seeds."""
        assert self.flops is not None, "they are counted where compute has a price"
        fossilized = [slot for slot in self.slots if slot.stage is Stage.FOSSILIZED]
        return self.flops.host + sum(self.flops.seed_flops(slot) for slot in fossilized)

    def record_state(self) -> dict[str, Any]:
        """Return the record of the training, in types that `torch.load(weights_only=True)` accepts."""
        return {
            "tick": self.tick,
            "last_op": int(self.last_op),
            "accounts": [list(account) for account in self.accounts],
            "trials": [dict(trials) for trials in self.trials],
            "history": {name: list(values) for name, values in vars(self.history).items()},
            "validated": validation_state(self.validated) if self.validated else None,
            "host_gradient": list(self.host_gradient) if self.host_gradient else None,
            "skipped_steps": self.skipped_steps,
        }

    def load_record_state(self, state: Mapping[str, Any]) -> None:
        """Restore the record of a training from `record_state`."""
        self.tick, self.last_op = state["tick"], Op(state["last_op"])
        self.accounts = [SeedAccount(*account) for account in state["accounts"]]
        self.trials = [dict(trials) for trials in state["trials"]]
        self.history = History(**{name: list(values) for name, values in state["history"].items()})
        self.validated = read_validation(state["validated"]) if state["validated"] else None
        self.host_gradient = GradientStats(*state["host_gradient"]) if state["host_gradient"] else None
        self.skipped_steps = state["skipped_steps"]
