"""The Governor's rules: pure functions that judge one host epoch from its statistics, and veto actions."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class GovernorConfig:
    """Settings of the Governor: when a host counts as diverged, and how it reacts."""

    enabled: bool = True
    """Monitor the hosts. If off, no host is rolled back, and a host that runs out of memory ends the run."""

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
                raise ValueError(f"governor.{name} must be at least 1 host epoch, got {getattr(self, name)}")
        for name in ("cooldown", "max_rollbacks", "penalty"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"governor.{name} must not be negative, got {getattr(self, name)}")
        for name in ("max_loss", "max_ratio", "learned", "guessing"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"governor.{name} must be positive, got {getattr(self, name)}")
        if not 0.0 < self.lr_factor <= 1.0:
            raise ValueError(f"governor.lr_factor must lie in (0, 1], got {self.lr_factor}")
        if self.max_growth is not None and not self.max_growth >= 1.0:
            raise ValueError(f"governor.max_growth must be at least 1 (the host alone), got {self.max_growth}")


class Watch(NamedTuple):
    """The Governor's memory of one host within one episode."""

    losses: tuple[float, ...] = ()
    """Validation losses of the last healthy host epochs, at most `window` of them."""
    panic: int = 0
    """Consecutive host epochs up to now whose loss was out of range, or near that of guessing."""
    cooldown: int = 0
    """Host epochs left in which only a number that is not finite leads to another rollback."""
    rollbacks: int = 0
    """Number of rollbacks in the episode so far."""
    learned: int = 0
    """Host epochs, since a seed last lost weight, in which the mean healthy loss was far below that of guessing."""


class Reading(NamedTuple):
    """Statistics of one host epoch on which the Governor's verdict depends."""

    loss: float
    """Validation loss."""
    train_loss: float
    """Training loss."""
    gradients: tuple[float, ...] = ()
    """Norms of the gradients of the host and of its seeds."""
    stuck: bool = False
    """True if every optimizer step was skipped, because the gradients left the range of half precision."""
    reshaped: bool = False
    """True if a seed lost weight in the host's output, so that the losses before are no longer normal."""


class Decision(Enum):
    """Verdict of the Governor on one host epoch."""

    HEALTHY = "healthy"
    SUSPICIOUS = "suspicious"
    ROLL_BACK = "rolled back"
    END = "ended"


class Verdict(NamedTuple):
    """Verdict of the Governor with its cause and the statistics behind it."""

    decision: Decision
    cause: str
    """Cause in one line; empty if the host is healthy."""
    loss: float
    """Validation loss of the epoch."""
    mean: float
    """Mean of the last healthy losses; NaN if there are none."""
    deviation: float
    """Standard deviation of the last healthy losses; NaN if there are none."""
    panic: int
    """Consecutive host epochs with an anomalous loss."""
    rollbacks: int
    """Rollbacks in this episode, including one decided here."""

    @property
    def diverged(self) -> bool:
        """True if the host is rolled back or its episode ends."""
        return self.decision in (Decision.ROLL_BACK, Decision.END)


def judge(watch: Watch, reading: Reading, chance: float, config: GovernorConfig) -> tuple[Verdict, Watch]:
    """Judge one host epoch.

    Args:
        state: State of the Governor for this host before the epoch.
        stats: Statistics of the epoch.
        chance_loss: Loss of guessing, ln(classes).
        config: Thresholds.

    Returns:
        The judgement, and the state after the epoch. Only healthy losses contribute to the normal loss.
    """
    cause = not_finite(reading)
    if cause is not None:
        return diverge(watch, cause, reading.loss, config)
    losses = () if reading.reshaped else watch.losses
    learned = (0 if reading.reshaped else watch.learned) + (spread(losses)[0] < config.learned * chance)
    suspicion = out_of_range(reading, losses, chance, config) or guesses_again(reading.loss, learned, chance, config)
    panic = watch.panic + 1 if suspicion else 0
    if panic >= config.patience and watch.cooldown == 0:
        return diverge(watch, f"{suspicion}, {panic} host epochs running", reading.loss, config)
    known = losses if suspicion else (*losses, reading.loss)[-config.window :]
    after = Watch(known, panic, max(0, watch.cooldown - 1), watch.rollbacks, learned)
    decision = Decision.SUSPICIOUS if suspicion else Decision.HEALTHY
    return Verdict(decision, suspicion or "", reading.loss, *spread(losses), panic, watch.rollbacks), after


def diverge(watch: Watch, cause: str, loss: float, config: GovernorConfig) -> tuple[Verdict, Watch]:
    """Return the judgement for a diverged host, and the state after it: a rollback, or the end of the episode.

    The episode ends if `max_rollbacks` is reached. The state forgets the healthy losses, because the restored host is
    a different network: it lacks the seeds that were alive.
    """
    last = watch.rollbacks >= config.max_rollbacks
    rollbacks = watch.rollbacks + (not last)
    verdict = Verdict(
        Decision.END if last else Decision.ROLL_BACK,
        f"{cause}, after {rollbacks} rollbacks" if last else cause,
        loss,
        *spread(watch.losses),
        watch.panic,
        rollbacks,
    )
    return verdict, Watch(cooldown=config.cooldown, rollbacks=rollbacks)


def spread(losses: tuple[float, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of the losses; NaN if there are none."""
    if not losses:
        return math.nan, math.nan
    mean = math.fsum(losses) / len(losses)
    return mean, math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / len(losses))


def not_finite(reading: Reading) -> str | None:
    """Return the reason why the host cannot continue (a number that is not finite), or None."""
    for name, number in (("loss", reading.loss), ("training loss", reading.train_loss)):
        if not math.isfinite(number):
            return f"{name} is {number}"
    wrong = [norm for norm in reading.gradients if not math.isfinite(norm)]
    return f"a gradient's norm is {wrong[0]}" if wrong else None


def normal(losses: tuple[float, ...], chance: float, config: GovernorConfig) -> float:
    """Return the normal loss: the mean of the healthy losses, or the loss of guessing if there are too few of them."""
    return math.fsum(losses) / len(losses) if len(losses) >= config.window else chance


def out_of_range(reading: Reading, losses: tuple[float, ...], chance: float, config: GovernorConfig) -> str | None:
    """Return the reason why a loss is out of range, or None."""
    if reading.stuck:
        return "every step was skipped, for gradients out of half precision's range"
    loss, usual = reading.loss, normal(losses, chance, config)
    if loss > config.max_loss:
        return f"loss {loss:.3g} is above {config.max_loss:g}"
    if loss > config.max_ratio * usual:
        return f"loss {loss:.3g} is out of range, normal is {usual:.3g}"
    return None


def guesses_again(loss: float, learned: int, chance: float, config: GovernorConfig) -> str | None:
    """Return the reason why a trained host seems to be guessing again, or None."""
    if learned > 0 and loss > (1.0 - config.guessing) * chance:
        return f"loss {loss:.3g} is that of guessing ({chance:.3g}) or worse, and the host had learned"
    return None


HELD_BACK = frozenset({"GERMINATE", "ADVANCE", "FOSSILIZE"})
"""Ops that are vetoed while the host's loss is out of range, because they build on its present state."""


def vet(op: str, growth: float, watch: Watch, config: GovernorConfig) -> list[str]:
    """Return the reasons to veto an op on a host; empty if it is allowed.

    Args:
        op: Name of the op.
        growth: Parameters of host and seeds after the op, divided by those that the host began with.
        state: State of the Governor for this host.
        config: Limits.
    """
    reasons = []
    if op in HELD_BACK and watch.panic:
        reasons.append(f"the loss has been out of range for {watch.panic} host epochs")
    if op == "GERMINATE" and config.max_growth is not None and growth > config.max_growth:
        reasons.append(
            f"it would have {growth:.3g} times the parameters it began with, more than governor.max_growth = "
            f"{config.max_growth:g}"
        )
    return reasons
