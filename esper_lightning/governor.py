"""The Governor's judgement: does the training of a host still go as it should? Numbers in, a verdict out."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class GovernorConfig:
    """When a host counts as diverged, and what follows."""

    enabled: bool = True
    """Watch over the hosts. Off, nothing is rolled back, and a host that runs out of memory ends the run."""

    window: int = 3
    """The last healthy host epochs, whose mean loss is what is normal; with fewer, it is the loss of guessing. Losses
    fall steeply at first, and a longer window knows only what was normal long ago: see docs/concepts/governor.md."""

    max_loss: float = 12.0
    """A loss above this is out of range whatever is normal: a sure mistake among 160,000 classes costs no more."""

    max_ratio: float = 2.75
    """Times the normal loss from which a loss is out of range."""

    patience: int = 3
    """Host epochs running with a loss out of range, or that of guessing, that count as divergence: a spike of one or
    two mostly mends itself."""

    learned: float = 0.6
    """Share of the loss of guessing, ln(classes), below which the mean of the healthy losses, however few, says that a
    host has learned."""

    guessing: float = 0.065
    """Share of ln(classes) that a host may stay below it, and yet seem to guess again if it had learned."""

    cooldown: int = 5
    """Host epochs after a rollback in which only a loss that is not a number leads to another one."""

    max_rollbacks: int = 3
    """Rollbacks in one episode; a host that diverges once more is restored, and its episode is over."""

    penalty: float = 1.0
    """Reward lost by a rollback, in place of that tick's reward: as much as a perfect host could ever gain."""

    snapshot_every: int = 5
    """Healthy host epochs between two snapshots."""

    lr_factor: float = 1.0
    """Learning rates of a host are multiplied by this when it is rolled back, until its episode is over."""

    max_growth: float | None = None
    """A host with its seeds may have at most this multiple of the parameters it began with. None: no limit."""

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
    """What the Governor remembers of one host in one episode."""

    losses: tuple[float, ...] = ()
    """Validation losses of the last healthy host epochs."""
    panic: int = 0
    """Host epochs running whose loss was out of range, or that of guessing."""
    cooldown: int = 0
    """Host epochs left in which a rollback is not repeated."""
    rollbacks: int = 0
    learned: int = 0
    """Host epochs, since a seed last lost weight, in which the healthy losses were far below that of guessing."""


class Reading(NamedTuple):
    """What a host epoch showed."""

    loss: float
    """Of validation."""
    train_loss: float
    gradients: tuple[float, ...] = ()
    """Norms of the host's and its seeds' gradients."""
    stuck: bool = False
    """Every step was skipped, because its gradients left the range of half precision."""
    reshaped: bool = False
    """A seed lost weight in the host's output, so what was normal before says nothing."""


class Decision(Enum):
    """What follows from a host epoch."""

    HEALTHY = "healthy"
    SUSPICIOUS = "suspicious"
    ROLL_BACK = "rolled back"
    END = "ended"


class Verdict(NamedTuple):
    """A judgement and the numbers behind it."""

    decision: Decision
    cause: str
    """In one line; empty if healthy."""
    loss: float
    mean: float
    """Of the healthy losses; not a number if there are none."""
    deviation: float
    panic: int
    rollbacks: int
    """So far in this episode, this one included."""

    @property
    def diverged(self) -> bool:
        return self.decision in (Decision.ROLL_BACK, Decision.END)


def judge(watch: Watch, reading: Reading, chance: float, config: GovernorConfig) -> tuple[Verdict, Watch]:
    """Judges one host epoch.

    Args:
        watch: What is known of the host.
        reading: What the epoch showed.
        chance: Loss of guessing, ln(classes).
        config: Thresholds.

    Returns:
        The verdict, and what is known after it. Only a loss that is healthy becomes part of what is normal.
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
    """A rollback, or the end of the episode where there have been enough of them. What was normal is forgotten: the
    restored host is another one, without the seeds that were alive."""
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
    """Mean and standard deviation; not numbers where there are no losses."""
    if not losses:
        return math.nan, math.nan
    mean = math.fsum(losses) / len(losses)
    return mean, math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / len(losses))


def not_finite(reading: Reading) -> str | None:
    """Why the host cannot go on, or None."""
    for name, number in (("loss", reading.loss), ("training loss", reading.train_loss)):
        if not math.isfinite(number):
            return f"{name} is {number}"
    wrong = [norm for norm in reading.gradients if not math.isfinite(norm)]
    return f"a gradient's norm is {wrong[0]}" if wrong else None


def normal(losses: tuple[float, ...], chance: float, config: GovernorConfig) -> float:
    """The loss that a host is held to: of a host that little is known of, nothing is expected but to guess."""
    return math.fsum(losses) / len(losses) if len(losses) >= config.window else chance


def out_of_range(reading: Reading, losses: tuple[float, ...], chance: float, config: GovernorConfig) -> str | None:
    """Why a loss is not normal, or None."""
    if reading.stuck:
        return "every step was skipped, for gradients out of half precision's range"
    loss, usual = reading.loss, normal(losses, chance, config)
    if loss > config.max_loss:
        return f"loss {loss:.3g} is above {config.max_loss:g}"
    if loss > config.max_ratio * usual:
        return f"loss {loss:.3g} is out of range, normal is {usual:.3g}"
    return None


def guesses_again(loss: float, learned: int, chance: float, config: GovernorConfig) -> str | None:
    """Why the host, which had learned, seems to have forgotten everything, or None."""
    if learned > 0 and loss > (1.0 - config.guessing) * chance:
        return f"loss {loss:.3g} is that of guessing ({chance:.3g}) or worse, and the host had learned"
    return None


HELD_BACK = frozenset({"GERMINATE", "ADVANCE", "FOSSILIZE"})
"""Ops that build on the host as it is."""


def vet(op: str, growth: float, watch: Watch, config: GovernorConfig) -> list[str]:
    """Reasons against a mutation of a host; empty: none.

    Args:
        op: Its name.
        growth: Parameters of host and seeds after it, over those that the host began with.
        watch: What is known of the host.
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
