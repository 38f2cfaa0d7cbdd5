"""Sums of the terms of the reward over an episode."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class EpisodeTerms:
    """Sums of the terms of the reward over the current episode, as means over hosts. Together they are the return.

    Args:
        horizon: Ticks of an episode.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.ticks = 0
        """Ticks of the current episode that are part of the sums."""
        self.sums: dict[str, float] = {}
        """Sum of each term so far, by its name."""

    def update(self, terms: Mapping[str, Tensor], tick: int) -> None:
        """Add the terms [N] of one environment step, on the CPU; `tick` counts steps of the episode from 1."""
        if tick == 1:
            self.ticks, self.sums = 0, {}
        self.ticks += 1
        for name, paid in terms.items():
            self.sums[name] = self.sums.get(name, 0.0) + paid.mean().item()

    def metrics(self) -> dict[str, float]:
        """Return the sums by tag at the end of an episode; none if a tick is missing."""
        if self.ticks < self.horizon:
            return {}
        return {f"rollout/reward.{name}": paid for name, paid in self.sums.items()}

    def state_dict(self) -> dict[str, Any]:
        sums = self.sums if self.ticks < self.horizon else {}  # those of a complete episode are written already
        return {"ticks": self.ticks if sums else 0, "names": list(sums), "sums": list(sums.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self.ticks, self.sums = state["ticks"], dict(zip(state["names"], state["sums"], strict=True))


def join_terms(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of `EpisodeTerms` of all hosts, given those of ranks with equal numbers of hosts."""
    means = [sum(of_term) / len(states) for of_term in zip(*(state["sums"] for state in states), strict=True)]
    return states[0] | {"sums": means}
