"""What the Governor holds of one host: what is normal for it, and its last good state."""

import math
from typing import Any

import torch

from esper_lightning.envs.snapshot import CPU, Snapshot
from esper_lightning.governor import Decision, GovernorConfig, Reading, Verdict, Watch, judge, spread, vet


class Guard:
    """Watches one host through its episodes.

    Args:
        config: Thresholds and limits.
        chance: Loss of guessing, ln(classes).
        steps: Optimizer steps in a host epoch.
        device: Where the host is.
    """

    def __init__(self, config: GovernorConfig, chance: float, steps: int, device: torch.device = CPU) -> None:
        self.config = config
        self.chance = chance
        self.steps = steps
        self.snapshot = Snapshot(device)
        self.begin()

    def begin(self) -> None:
        """A new episode: nothing is known yet, and nothing kept."""
        self.watch = Watch()
        self.healthy_ticks = 0  # since the last snapshot
        self.alphas: list[float] = []  # of each slot, in the last host epoch

    def vet(self, op: str, growth: float) -> list[str]:
        """Reasons against a mutation; see `governor.vet`."""
        return vet(op, growth, self.watch, self.config)

    def judge(self, reading: Reading, skipped_steps: int, alphas: list[float]) -> Verdict:
        """Judges a host epoch, and remembers.

        Args:
            reading: What it showed; `stuck` and `reshaped` are found out here.
            skipped_steps: Of this epoch.
            alphas: How much of each slot's seed was in the host's output.
        """
        reshaped = any(now < before for now, before in zip(alphas, self.alphas, strict=False))
        reading = reading._replace(stuck=skipped_steps >= self.steps, reshaped=reshaped)
        verdict, self.watch = judge(self.watch, reading, self.chance, self.config)
        self.alphas = alphas
        # A restored host is kept again once it has proved itself.
        self.healthy_ticks = 0 if verdict.diverged else self.healthy_ticks + (verdict.decision is Decision.HEALTHY)
        return verdict

    def give_up(self, cause: str) -> Verdict:
        """The host cannot go on, whatever it showed."""
        mean, deviation = spread(self.watch.losses)
        verdict = Verdict(Decision.END, cause, math.nan, mean, deviation, self.watch.panic, self.watch.rollbacks)
        self.watch = Watch(rollbacks=self.watch.rollbacks)
        return verdict

    @property
    def due(self) -> bool:
        """Is it time for a snapshot? Only right after a host epoch that was healthy."""
        return self.watch.panic == 0 and self.healthy_ticks >= self.config.snapshot_every

    def keep(self, state: dict[str, Any]) -> None:
        """Takes a snapshot."""
        self.snapshot.take(state)
        self.healthy_ticks = 0

    def state_dict(self) -> dict[str, Any]:
        losses, *counts = self.watch
        return {
            "losses": list(losses),
            "counts": counts,
            "healthy_ticks": self.healthy_ticks,
            "alphas": list(self.alphas),
            "snapshot": self.snapshot.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.watch = Watch(tuple(state["losses"]), *state["counts"])
        self.healthy_ticks = state["healthy_ticks"]
        self.alphas = list(state["alphas"])
        self.snapshot.take(state["snapshot"])
