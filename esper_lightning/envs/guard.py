"""State of the Governor for one host: loss statistics and a snapshot of the last good state."""

import math
from typing import Any

import torch

from esper_lightning.envs.snapshot import CPU, Snapshot
from esper_lightning.governor import Decision, GovernorConfig, Reading, Verdict, Watch, judge, spread, vet


class Guard:
    """Monitors one host across episodes: judges its epochs and holds its snapshot.

    Args:
        config: Thresholds and limits.
        chance: Loss of uniform guessing, ln(classes).
        steps: Optimizer steps in a host epoch.
        device: Device of the host.
    """

    def __init__(self, config: GovernorConfig, chance: float, steps: int, device: torch.device = CPU) -> None:
        self.config = config
        self.chance = chance
        self.steps = steps
        self.snapshot = Snapshot(device)
        self.begin()

    def begin(self) -> None:
        """Reset the statistics at the start of an episode."""
        self.watch = Watch()
        self.healthy_ticks = 0  # since the last snapshot
        self.alphas: list[float] = []  # alpha of each slot in the last host epoch, [K]

    def vet(self, op: str, growth: float) -> list[str]:
        """Return the reasons to veto an op; see the function of the Governor."""
        return vet(op, growth, self.watch, self.config)

    def judge(self, reading: Reading, skipped_steps: int, alphas: list[float]) -> Verdict:
        """Judge a host epoch and update the statistics.

        Args:
            reading: Statistics of the epoch; `stuck` and `reshaped` are filled in here.
            skipped_steps: Optimizer steps that were skipped in the epoch because gradients overflowed fp16.
            alphas: Alpha of the seed in each slot, [K]; 0 for a seed that is not blended.
        """
        reshaped = any(now < before for now, before in zip(alphas, self.alphas, strict=False))
        reading = reading._replace(stuck=skipped_steps >= self.steps, reshaped=reshaped)
        verdict, self.watch = judge(self.watch, reading, self.chance, self.config)
        self.alphas = alphas
        # A restored host gets a new snapshot only after enough healthy epochs.
        self.healthy_ticks = 0 if verdict.diverged else self.healthy_ticks + (verdict.decision is Decision.HEALTHY)
        return verdict

    def give_up(self, cause: str) -> Verdict:
        """Return a verdict that ends the episode, for a host that cannot continue."""
        mean, deviation = spread(self.watch.losses)
        verdict = Verdict(Decision.END, cause, math.nan, mean, deviation, self.watch.panic, self.watch.rollbacks)
        self.watch = Watch(rollbacks=self.watch.rollbacks)
        return verdict

    @property
    def due(self) -> bool:
        """True if a snapshot is due, which is only the case right after a healthy epoch."""
        return self.watch.panic == 0 and self.healthy_ticks >= self.config.snapshot_every

    def keep(self, state: dict[str, Any]) -> None:
        """Replace the snapshot by a copy of `state`."""
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
