"""The Governor's rules: pure functions that judge one host epoch from its statistics, and veto actions."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class GovernorConfig:
    """Settings of the Governor: when a host counts as diverged, and how it reacts."""

    window: int = 3
    """Number of last healthy host epochs whose mean loss is the normal loss; with fewer, it is the loss of guessing.
    Losses fall steeply at first, so the mean over a longer window is out of date: see docs/concepts/governor.md."""

    max_loss: float = 12.0
    """Loss above which a host is out of range, whatever its normal loss: that of guessing among 160,000 classes."""

    max_ratio: float = 2.75
    """Multiple of the normal loss above which a loss is out of range."""

    patience: int = 3
    """Consecutive host epochs with a loss out of range, or near that of guessing, that count as divergence. A spike of
    one or two epochs mostly mends itself."""

    learned: float = 0.6
    """Share of the loss of guessing, ln(classes): a host whose mean healthy loss was below it counts as trained."""

    guessing: float = 0.065
    """Margin below the loss of guessing, as a share of it: a trained host whose loss rises into this margin or above
    it counts as guessing again."""

    cooldown: int = 5
    """Host epochs after a rollback in which only a number that is not finite leads to another rollback."""

    max_rollbacks: int = 3
    """Rollbacks allowed in one episode; a host that diverges once more is restored, and its episode ends."""

    penalty: float = 1.0
    """Penalty of a rollback, which replaces the reward of that tick; 1 is as much as a perfect host could ever gain."""

    snapshot_every: int = 5
    """Healthy host epochs between two snapshots."""

    lr_factor: float = 1.0
    """Factor applied to a host's learning rates at each rollback, until its episode ends."""

    max_growth: float | None = None
    """Largest number of parameters of a host with its seeds, as a multiple of those it began with. None: no limit."""

    def __post_init__(self) -> None:
        for name in ("window", "patience", "snapshot_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"Governor.rules.{name} must be at least 1 host epoch, got {getattr(self, name)}")
        for name in ("cooldown", "max_rollbacks", "penalty"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Governor.rules.{name} must not be negative, got {getattr(self, name)}")
        for name in ("max_loss", "max_ratio", "learned", "guessing"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"Governor.rules.{name} must be positive, got {getattr(self, name)}")
        if not 0.0 < self.lr_factor <= 1.0:
            raise ValueError(f"Governor.rules.lr_factor must lie in (0, 1], got {self.lr_factor}")
        if self.max_growth is not None and not self.max_growth >= 1.0:
            raise ValueError(f"Governor.rules.max_growth must be at least 1 (the host alone), got {self.max_growth}")


class GovernorState(NamedTuple):
    """The Governor's memory of one host within one episode."""

    losses: tuple[float, ...] = ()
    """Validation losses of the last healthy host epochs, at most `window` of them."""
    consecutive_anomalies: int = 0
    """Consecutive host epochs up to now whose loss was out of range, or near that of guessing."""
    cooldown: int = 0
    """Host epochs left in which only a number that is not finite leads to another rollback."""
    rollbacks: int = 0
    """Number of rollbacks in the episode so far."""
    trained_epochs: int = 0
    """Host epochs, since a seed last lost weight, in which the mean healthy loss was far below that of guessing."""


class EpochStats(NamedTuple):
    """Statistics of one host epoch on which the Governor's verdict depends."""

    loss: float
    """Validation loss."""
    train_loss: float
    """Training loss."""
    gradient_norms: tuple[float, ...] = ()
    """Norms of the gradients of the host and of its seeds."""
    all_steps_skipped: bool = False
    """True if every optimizer step was skipped, because the gradients left the range of half precision."""
    seed_lost_weight: bool = False
    """True if a seed lost weight in the host's output, so that the losses before are no longer normal."""


class Verdict(Enum):
    """Verdict of the Governor on one host epoch."""

    HEALTHY = "healthy"
    SUSPICIOUS = "suspicious"
    ROLL_BACK = "rolled back"
    END = "ended"


class Judgement(NamedTuple):
    """Verdict of the Governor with its cause and the statistics behind it."""

    outcome: Verdict
    cause: str
    """Cause in one line; empty if the host is healthy."""
    loss: float
    """Validation loss of the epoch."""
    mean: float
    """Mean of the last healthy losses; NaN if there are none."""
    deviation: float
    """Standard deviation of the last healthy losses; NaN if there are none."""
    consecutive_anomalies: int
    """Consecutive host epochs with an anomalous loss."""
    rollbacks: int
    """Rollbacks in this episode, including one decided here."""

    @property
    def diverged(self) -> bool:
        """True if the host is rolled back or its episode ends."""
        return self.outcome in (Verdict.ROLL_BACK, Verdict.END)


def judge(
    state: GovernorState, stats: EpochStats, chance_loss: float, *, config: GovernorConfig
) -> tuple[Judgement, GovernorState]:
    """Judge one host epoch.

    Args:
        state: State of the Governor for this host before the epoch.
        stats: Statistics of the epoch.
        chance_loss: Loss of guessing, ln(classes).
        config: Thresholds.

    Returns:
        The judgement, and the state after the epoch. Only healthy losses contribute to the normal loss.
    """
    cause = not_finite_reason(stats)
    if cause is not None:
        return roll_back_or_end(state, cause, stats.loss, config=config)
    losses = () if stats.seed_lost_weight else state.losses
    trained_epochs = (0 if stats.seed_lost_weight else state.trained_epochs) + (
        mean_and_deviation(losses)[0] < config.learned * chance_loss
    )
    suspicion = out_of_range_reason(stats, losses, chance_loss, config=config) or guessing_reason(
        stats.loss, trained_epochs, chance_loss, config=config
    )
    anomalies = state.consecutive_anomalies + 1 if suspicion else 0
    if anomalies >= config.patience and state.cooldown == 0:
        return roll_back_or_end(state, f"{suspicion}, {anomalies} host epochs running", stats.loss, config=config)
    healthy_losses = losses if suspicion else (*losses, stats.loss)[-config.window :]
    after = GovernorState(healthy_losses, anomalies, max(0, state.cooldown - 1), state.rollbacks, trained_epochs)
    outcome = Verdict.SUSPICIOUS if suspicion else Verdict.HEALTHY
    return Judgement(
        outcome, suspicion or "", stats.loss, *mean_and_deviation(losses), anomalies, state.rollbacks
    ), after


def roll_back_or_end(
    state: GovernorState, cause: str, loss: float, *, config: GovernorConfig
) -> tuple[Judgement, GovernorState]:
    """Return the judgement for a diverged host, and the state after it: a rollback, or the end of the episode.

    The episode ends if `max_rollbacks` is reached. The state forgets the healthy losses, because the restored host is
    a different network: it lacks the seeds that were alive.
    """
    ends = state.rollbacks >= config.max_rollbacks
    rollbacks = state.rollbacks + (not ends)
    judgement = Judgement(
        Verdict.END if ends else Verdict.ROLL_BACK,
        f"{cause}, after {rollbacks} rollbacks" if ends else cause,
        loss,
        *mean_and_deviation(state.losses),
        state.consecutive_anomalies,
        rollbacks,
    )
    return judgement, GovernorState(cooldown=config.cooldown, rollbacks=rollbacks)


def mean_and_deviation(losses: tuple[float, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of the losses; NaN if there are none."""
    if not losses:
        return math.nan, math.nan
    mean = math.fsum(losses) / len(losses)
    return mean, math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / len(losses))


def not_finite_reason(stats: EpochStats) -> str | None:
    """Return the reason why the host cannot continue (a number that is not finite), or None."""
    for name, number in (("loss", stats.loss), ("training loss", stats.train_loss)):
        if not math.isfinite(number):
            return f"{name} is {number}"
    bad_norms = [norm for norm in stats.gradient_norms if not math.isfinite(norm)]
    return f"a gradient's norm is {bad_norms[0]}" if bad_norms else None


def normal_loss(losses: tuple[float, ...], chance_loss: float, config: GovernorConfig) -> float:
    """Return the normal loss: the mean of the healthy losses, or the loss of guessing if there are too few of them."""
    return math.fsum(losses) / len(losses) if len(losses) >= config.window else chance_loss


def out_of_range_reason(
    stats: EpochStats, losses: tuple[float, ...], chance_loss: float, *, config: GovernorConfig
) -> str | None:
    """Return the reason why a loss is out of range, or None."""
    if stats.all_steps_skipped:
        return "every step was skipped, for gradients out of half precision's range"
    loss, expected = stats.loss, normal_loss(losses, chance_loss, config)
    if loss > config.max_loss:
        return f"loss {loss:.3g} is above {config.max_loss:g}"
    if loss > config.max_ratio * expected:
        return f"loss {loss:.3g} is out of range, normal is {expected:.3g}"
    return None


def guessing_reason(loss: float, trained_epochs: int, chance_loss: float, *, config: GovernorConfig) -> str | None:
    """Return the reason why a trained host seems to be guessing again, or None."""
    if trained_epochs > 0 and loss > (1.0 - config.guessing) * chance_loss:
        return f"loss {loss:.3g} is that of guessing ({chance_loss:.3g}) or worse, and the host had learned"
    return None


OPS_VETOED_DURING_ANOMALY = frozenset({"GERMINATE", "FOSSILIZE"})
"""Ops that are vetoed while the host's loss is out of range or near that of guessing: they build on its present
state."""


def veto_reasons(op: str, growth: float, state: GovernorState, *, config: GovernorConfig) -> list[str]:
    """Return the reasons to veto an op on a host; empty if it is allowed.

    Args:
        op: Name of the op.
        growth: Parameters of host and seeds after the op, divided by those that the host began with.
        state: State of the Governor for this host.
        config: Limits.
    """
    reasons = []
    if op in OPS_VETOED_DURING_ANOMALY and state.consecutive_anomalies:
        reasons.append(f"the loss has been out of range or near guessing for {state.consecutive_anomalies} host epochs")
    if op == "GERMINATE" and config.max_growth is not None and growth > config.max_growth:
        reasons.append(
            f"it would have {growth:.3g} times the parameters it began with, more than "
            f"Governor.rules.max_growth = {config.max_growth:g}"
        )
    return reasons
