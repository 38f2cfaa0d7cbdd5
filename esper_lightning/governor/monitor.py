"""State of the Governor for one host: loss statistics and a snapshot of the last good state."""

from typing import Any

import torch

from esper_lightning.governor.judge import (
    EpochStats,
    GovernorConfig,
    GovernorState,
    Judgement,
    Verdict,
    judge,
    veto_reasons,
)
from esper_lightning.governor.snapshot import CPU, Snapshot


class HostMonitor:
    """Monitors one host across episodes: judges its epochs and holds its snapshot.

    Args:
        config: Thresholds and limits.
        chance_loss: Loss of uniform guessing, ln(classes).
        steps_per_epoch: Optimizer steps in a host epoch.
        device: Device of the host.
    """

    def __init__(
        self, config: GovernorConfig, *, chance_loss: float, steps_per_epoch: int, device: torch.device = CPU
    ) -> None:
        self.config = config
        self.chance_loss = chance_loss
        self.steps_per_epoch = steps_per_epoch
        self.snapshot = Snapshot(device)
        self.reset()

    def reset(self) -> None:
        """Reset the statistics at the start of an episode."""
        self.governor_state = GovernorState()
        self.healthy_ticks = 0  # since the last snapshot
        self.alphas: list[float] = []  # alpha of each slot in the last host epoch, [K]

    def refusal_reasons(self, op: str, growth: float) -> list[str]:
        """Return the reasons to veto an op; see `veto_reasons`."""
        return veto_reasons(op, growth, self.governor_state, config=self.config)

    def judge(self, stats: EpochStats, skipped_steps: int, alphas: list[float]) -> Judgement:
        """Judge a host epoch and update the statistics.

        Args:
            stats: Statistics of the epoch; `all_steps_skipped` and `seed_lost_weight` are filled in here.
            skipped_steps: Optimizer steps that were skipped in the epoch because gradients overflowed fp16.
            alphas: Alpha of the seed in each slot, [K]; 0 for a seed that is not blended.
        """
        # In the first tick there is no alpha before.
        lost_weight = any(now < before for now, before in zip(alphas, self.alphas, strict=False))
        stats = stats._replace(all_steps_skipped=skipped_steps >= self.steps_per_epoch, seed_lost_weight=lost_weight)
        judgement, self.governor_state = judge(self.governor_state, stats, self.chance_loss, config=self.config)
        self.alphas = alphas
        # A restored host gets a new snapshot only after enough healthy epochs.
        self.healthy_ticks = 0 if judgement.diverged else self.healthy_ticks + (judgement.outcome is Verdict.HEALTHY)
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
        losses, *counts = self.governor_state
        return {
            "losses": list(losses),
            "counts": counts,
            "healthy_ticks": self.healthy_ticks,
            "alphas": list(self.alphas),
            "snapshot": self.snapshot.view(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.governor_state = GovernorState(tuple(state["losses"]), *state["counts"])
        self.healthy_ticks = state["healthy_ticks"]
        self.alphas = list(state["alphas"])
        self.snapshot.take(state["snapshot"])
