"""Inputs of the reward: one environment step of one host, as plain numbers."""

from typing import NamedTuple

from esper_lightning.growth.stages import LIVE, OCCUPIED, Stage


class SeedAccount(NamedTuple):
    """Memory of the reward for the seed in one slot; a part of the host's state."""

    accuracy_at_germination: float = 0.0
    """Validation accuracy of the host when the seed was germinated."""
    ticks_left: int = 0
    """Ticks from the seed's fossilization to the horizon, both included; 0: not fossilized."""
    credit: float = 0.0
    """Accuracy points that mode `escrow` has paid for the seed so far."""


class SlotStatus(NamedTuple):
    """State of a slot at one moment."""

    stage: Stage
    """Stage of the seed; DORMANT for an empty slot."""
    ticks_in_stage: int
    """Ticks that the seed has spent in its stage."""
    age: int
    """Ticks since the seed was germinated."""


class SlotStep(NamedTuple):
    """One slot in one environment step: before the action, right after it, and at the end of the step."""

    before: SlotStatus
    """State before the action."""
    after_action: SlotStatus
    """State right after the action, before the host trains."""
    after: SlotStatus
    """State at the end of the step."""
    account: SeedAccount
    """Account right after the action."""
    contribution_before: float
    """Contribution in accuracy points of 100, as last measured before the action; 0 for a seed that is not blended."""
    contribution: float
    """Contribution in accuracy points of 100 at the end of the step."""
    growth: float
    """`parameters` divided by those of the host, or by `objective.smallest_host` if that is more."""
    alpha: float
    """Weight of the seed in the host's output during this step."""
    parameters: int
    """Number of parameters of the seed that trained in this step, fossilized or not; 0 if there was none."""

    @property
    def removed_after_training(self) -> bool:
        """True if the seed was removed automatically, after it trained in this step."""
        return self.after_action.stage in LIVE and self.after.stage not in OCCUPIED

    @property
    def culled_by_action(self) -> bool:
        """True if the seed was removed in this step by an action."""
        return self.before.stage in LIVE and self.after_action.stage is Stage.CULLED

    @property
    def newly_fossilized(self) -> bool:
        """True if the seed was fossilized in this step."""
        return self.after_action.stage is Stage.FOSSILIZED and self.before.stage is not Stage.FOSSILIZED


class HostStep(NamedTuple):
    """One environment step of one host: the action, and the measurements before and after it.

    Accuracies lie in 0 … 1. Accuracies and losses are validated with all live seeds unless stated otherwise.
    """

    op: str
    """Name of the op that was carried out, after vetoes."""
    already_ended: bool
    """The host's episode had ended before this step; nothing happens any more."""
    at_horizon: bool
    """The step reaches the horizon; seeds that are not fossilized are dropped."""
    diverged: bool
    """The host was rolled back: the trajectory ends, and the measurements do not result from the action."""
    objective_before: float
    """J before the action."""
    objective: float
    """J after the step, with all live seeds; at the horizon with fossilized seeds only."""
    fossilized_objective_before: float
    """J before the action with fossilized seeds only."""
    fossilized_objective: float
    """J after the step with fossilized seeds only, as if the episode ended here."""
    accuracy_at_start: float
    """Accuracy at the start of the episode."""
    accuracy_before: float
    """Accuracy before the action."""
    accuracy: float
    """Accuracy after the step."""
    fossilized_accuracy: float
    """Accuracy after the step with fossilized seeds only."""
    host_only_accuracy_before: float
    """Accuracy before the action with every seed switched off; with all live seeds unless `needs_host_only`."""
    host_only_accuracy: float
    """Accuracy after the step with every seed switched off; with all live seeds unless `needs_host_only`."""
    loss_before: float
    """Loss before the action."""
    loss: float
    """Loss after the step."""
    fossilized_loss: float
    """Loss after the step with fossilized seeds only."""
    chance_loss: float
    """Loss of guessing, ln(classes)."""
    slots: tuple[SlotStep, ...]
    """One record per slot, [K]; empty in modes `objective`, `kept` and `sparse`, which do not depend on seeds."""
