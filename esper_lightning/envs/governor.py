"""The Governor's rules: pure functions that judge one host epoch from its statistics and veto actions; its memory."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from esper_lightning.envs.snapshot import CPU, Snapshot


@dataclass(frozen=True, kw_only=True)
class GovernorConfig:
    """Settings of the Governor: when a host counts as diverged, and how it reacts."""

    window: int = 3
    """Number of last healthy host epochs whose mean loss is the normal loss; with fewer, it is the loss of guessing."""

    max_loss: float = 12.0
    """Loss above which a host is out of range, whatever its normal loss: that of guessing among 160,000 classes."""

    max_ratio: float = 2.75
    """Multiple of the normal loss above which a loss is out of range."""

    patience: int = 3
    """Consecutive suspicious host epochs that count as divergence: a spike of one or two mostly mends itself."""

    learned: float = 0.6
    """Share of the loss of guessing, ln(classes): a host whose mean healthy loss was below it counts as trained."""

    guessing: float = 0.065
    """Margin below the loss of guessing, as a share of it: a trained host with a loss above is guessing again."""

    cooldown: int = 5
    """Host epochs after a rollback in which only a number that is not finite leads to another rollback."""

    max_rollbacks: int = 3
    """Rollbacks allowed in one episode; a host that diverges once more is restored, and its episode ends."""

    penalty: float = 1.0
    """Penalty of a rollback, which replaces the reward of that tick; 1 is as much as a perfect host could ever gain."""

    snapshot_every: int = 5
    """Healthy host epochs between two snapshots."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("window", "patience", "snapshot_every") and value < 1:
                raise ValueError(f"Governor.rules.{name} must be at least 1 host epoch, got {value}")
            if name in ("cooldown", "max_rollbacks", "penalty") and not value >= 0:
                raise ValueError(f"Governor.rules.{name} must not be negative, got {value}")
            if name in ("max_loss", "max_ratio", "learned", "guessing") and not value > 0.0:
                raise ValueError(f"Governor.rules.{name} must be positive, got {value}")


class GovernorState(NamedTuple):
    """The Governor's memory of one host within one episode."""

    losses: tuple[float, ...] = ()  # validation losses of the last healthy host epochs, at most `window` of them
    consecutive_anomalies: int = 0  # host epochs up to now whose loss was out of range, or near that of guessing
    cooldown: int = 0  # host epochs left in which only a number that is not finite leads to another rollback
    rollbacks: int = 0  # in the episode so far
    trained_epochs: int = 0
    """Host epochs, since a seed last lost weight, in which the mean healthy loss was far below that of guessing."""


class EpochStats(NamedTuple):
    """Statistics of one host epoch on which the Governor's verdict depends."""

    loss: float  # of validation
    train_loss: float
    gradient_norms: tuple[float, ...] = ()  # of the host and of its seeds
    all_steps_skipped: bool = False  # because the gradients left the range of half precision
    seed_lost_weight: bool = False  # a seed did in the host's output, so that the losses before are no longer normal


class Verdict(StrEnum):
    """Verdict of the Governor on one host epoch."""

    HEALTHY = "healthy"
    SUSPICIOUS = "suspicious"
    ROLL_BACK = "rolled back"
    END = "ended"

    @property
    def diverged(self) -> bool:
        """True if the host is rolled back or its episode ends."""
        return self in (Verdict.ROLL_BACK, Verdict.END)


class Judgement(NamedTuple):
    """Verdict of the Governor with its cause."""

    outcome: Verdict
    cause: str = ""  # in one line; empty if the host is healthy


def judge(
    state: GovernorState, stats: EpochStats, chance_loss: float, *, config: GovernorConfig
) -> tuple[Judgement, GovernorState]:
    """Return the judgement on one host epoch, and the Governor's state after it. `chance_loss`: of guessing."""
    gradients = (("a gradient's norm", norm) for norm in stats.gradient_norms)
    for name, number in (("loss", stats.loss), ("training loss", stats.train_loss), *gradients):
        if not math.isfinite(number):
            return _roll_back_or_end(state, f"{name} is {number}", config)

    # After a seed lost weight in the output, the losses before are no longer normal.
    losses, trained_epochs = ((), 0) if stats.seed_lost_weight else (state.losses, state.trained_epochs)
    mean = math.fsum(losses) / len(losses) if losses else chance_loss
    trained_epochs += bool(losses) and mean < config.learned * chance_loss
    normal, loss, suspicion = mean if len(losses) >= config.window else chance_loss, stats.loss, ""
    if stats.all_steps_skipped:
        suspicion = "every step was skipped, for gradients out of half precision's range"
    elif loss > config.max_loss:
        suspicion = f"loss {loss:.3g} is above {config.max_loss:g}"
    elif loss > config.max_ratio * normal:
        suspicion = f"loss {loss:.3g} is out of range, normal is {normal:.3g}"
    elif trained_epochs > 0 and loss > (1.0 - config.guessing) * chance_loss:
        suspicion = f"loss {loss:.3g} is that of guessing ({chance_loss:.3g}) or worse, and the host had learned"

    anomalies = state.consecutive_anomalies + 1 if suspicion else 0
    if anomalies >= config.patience and state.cooldown == 0:
        return _roll_back_or_end(state, f"{suspicion}, {anomalies} host epochs running", config)
    healthy_losses = losses if suspicion else (*losses, loss)[-config.window :]  # they alone are normal
    after = GovernorState(healthy_losses, anomalies, max(0, state.cooldown - 1), state.rollbacks, trained_epochs)
    return Judgement(Verdict.SUSPICIOUS if suspicion else Verdict.HEALTHY, suspicion), after


def _roll_back_or_end(state: GovernorState, cause: str, config: GovernorConfig) -> tuple[Judgement, GovernorState]:
    """Return the judgement for a diverged host, and the state after it; the episode ends after `max_rollbacks`."""
    # It forgets the healthy losses, because the restored host is a different network: it lacks the live seeds.
    after = GovernorState(cooldown=config.cooldown, rollbacks=state.rollbacks)
    if state.rollbacks >= config.max_rollbacks:
        return Judgement(Verdict.END, f"{cause}, after {state.rollbacks} rollbacks"), after
    return Judgement(Verdict.ROLL_BACK, cause), after._replace(rollbacks=state.rollbacks + 1)


def veto_reasons(op: str, state: GovernorState) -> list[str]:
    """Return the reasons to veto an op that builds on the host's present state; empty if it is allowed."""
    if op not in ("GERMINATE", "FOSSILIZE") or not state.consecutive_anomalies:
        return []
    return [f"the loss has been out of range or near guessing for {state.consecutive_anomalies} host epochs"]


class HostMonitor:
    """Monitors one host across episodes: judges its epochs of `steps_per_epoch` steps, and holds its snapshot."""

    def __init__(
        self, config: GovernorConfig, *, chance_loss: float, steps_per_epoch: int, device: torch.device = CPU
    ) -> None:
        self.config, self.chance_loss, self.steps_per_epoch = config, chance_loss, steps_per_epoch
        self.snapshot = Snapshot(device)
        self.reset()

    def reset(self) -> None:
        """Reset the statistics at the start of an episode."""
        self.governor_state = GovernorState()
        self.healthy_ticks = 0  # since the last snapshot
        self.alphas: list[float] = []  # alpha of each slot in the last host epoch, [K]

    def judge(self, stats: EpochStats, skipped_steps: int, alphas: list[float]) -> Judgement:
        """Judge a host epoch and update the statistics; the last two flags of `stats` are filled in here.

        `skipped_steps`: by fp16. `alphas` [K]: of the slots, 0 for a seed that is not blended.
        """
        # In the first tick there is no alpha before.
        lost_weight = any(now < before for now, before in zip(alphas, self.alphas, strict=False))
        stats = stats._replace(all_steps_skipped=skipped_steps >= self.steps_per_epoch, seed_lost_weight=lost_weight)
        judgement, self.governor_state = judge(self.governor_state, stats, self.chance_loss, config=self.config)
        self.alphas = alphas
        # A restored host gets a new snapshot only after enough healthy epochs.
        outcome = judgement.outcome
        self.healthy_ticks = 0 if outcome.diverged else self.healthy_ticks + (outcome is Verdict.HEALTHY)
        return judgement

    def judge_failure(self, cause: str) -> Judgement:
        """Return a verdict that ends the episode, for a host that cannot continue."""
        self.governor_state = GovernorState(rollbacks=self.governor_state.rollbacks)
        return Judgement(Verdict.END, cause)

    @property
    def snapshot_due(self) -> bool:
        """True if a snapshot is due, which is only the case right after a healthy epoch."""
        return self.governor_state.consecutive_anomalies == 0 and self.healthy_ticks >= self.config.snapshot_every

    def take_snapshot(self, state: dict[str, Any]) -> None:
        """Replace the snapshot by a copy of `state`."""
        self.snapshot.take(state)
        self.healthy_ticks = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state; its tensors are views of the snapshot, which the next one overwrites."""
        return {
            "governor_state": self.governor_state._asdict(),
            "healthy_ticks": self.healthy_ticks,
            "alphas": list(self.alphas),
            "snapshot": self.snapshot.view(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.governor_state = GovernorState(**state["governor_state"])
        self.healthy_ticks = state["healthy_ticks"]
        self.alphas = list(state["alphas"])
        self.snapshot.take(state["snapshot"])
