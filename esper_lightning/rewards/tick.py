"""What rewards are paid for: one tick of one host, as plain numbers."""

from typing import NamedTuple

from esper_lightning.growth.stages import LIVE, OCCUPIED, Stage


class Account(NamedTuple):
    """What is remembered of the seed in a slot for the sake of rewards; a part of the host's state."""

    start: float = 0.0
    """Validation accuracy when it was germinated."""
    rest: int = 0
    """Ticks from its fossilization to the horizon, both included; 0: not fossilized."""
    credit: float = 0.0
    """Accuracy points that mode `escrow` has paid for it so far."""


class Seed(NamedTuple):
    """A slot at one moment."""

    stage: Stage
    ticks_in_stage: int
    age: int
    fading: bool
    """A slow cull is under way."""


class SlotTick(NamedTuple):
    """One slot in one tick: as the decision found it, as it left it, and as it was when the tick was over."""

    before: Seed
    acted: Seed
    after: Seed
    account: Account
    """After the decision."""
    contribution_before: float
    """Accuracy points of 100, as last measured before the decision; 0 for a seed that is not blended."""
    contribution: float
    """As measured at the end of the tick."""
    growth: float
    """Parameters of the seed that trained in this tick, over the host's."""
    alpha: float
    """How much of it was in the host's output."""

    @property
    def dismissed(self) -> bool:
        """Was its cull decided in this tick? A slow one begins."""
        begins_to_fade = self.acted.fading and not self.before.fading
        return self.before.stage in LIVE and (self.acted.stage is Stage.CULLED or begins_to_fade)

    @property
    def left(self) -> bool:
        """Was the seed removed after it had trained in this tick: by itself, or because it had faded out?"""
        return self.acted.stage in LIVE and self.after.stage not in OCCUPIED

    @property
    def culled(self) -> bool:
        """Is the seed gone because that was decided: at once, or now that it has faded out?"""
        at_once = self.before.stage in LIVE and self.acted.stage is Stage.CULLED
        return at_once or (self.left and self.acted.fading)

    @property
    def kept(self) -> bool:
        """Was it fossilized in this tick?"""
        return self.acted.stage is Stage.FOSSILIZED and self.before.stage is not Stage.FOSSILIZED


class Tick(NamedTuple):
    """One host's tick: the decision, and what was measured before and after it.

    Accuracies are in 0 … 1 and, like losses, those of the host with its live seeds, unless they say otherwise.
    """

    op: str
    """That was carried out."""
    over: bool
    """The host's episode had ended before: nothing happens any more."""
    last: bool
    """The horizon is reached: what is not fossilized is dropped."""
    diverged: bool
    """The host was rolled back: the trajectory ends, and what was measured is not this tick's doing."""
    objective_before: float
    objective: float
    """J; at the horizon of what is kept, otherwise with live seeds."""
    kept_objective_before: float
    kept_objective: float
    """J of what is kept: what it would be if the episode ended here."""
    accuracy_at_start: float
    """When the episode began."""
    accuracy_before: float
    accuracy: float
    kept_accuracy: float
    """With the fossilized seeds alone."""
    bare_before: float
    bare: float
    """With every seed switched off; measured in mode `shaped` only, else that of the host as it is."""
    loss_before: float
    loss: float
    kept_loss: float
    chance: float
    """Loss of guessing, ln(classes)."""
    slots: tuple[SlotTick, ...]
    """Empty in modes that are not paid for seeds."""
