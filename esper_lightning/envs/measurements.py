"""Measurements of a host in one training epoch and one validation pass, as Python numbers. K slots."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from esper_lightning.growth.gates import GradientStats

POINTS_PER_UNIT = 100.0
"""Points in a score of 1: contributions and gains of scores are in points."""


class LossAndScore(NamedTuple):
    """Mean loss and score over one split of the data."""

    loss: float
    score: float


class Validation(NamedTuple):
    """Scores of one host in one validation pass, by the active seeds."""

    all_seeds: LossAndScore  # all blended ones
    without: list[LossAndScore]  # leave-one-out, [K]: all seeds except the one in this slot
    fossilized: LossAndScore  # fossilized seeds only, which are the ones that remain at the horizon
    host_only: LossAndScore | None = None  # every seed switched off. None: not measured

    @property
    def contributions(self) -> list[float]:
        """Points (of 100) lost without the seed in each slot, [K]; 0 for a seed that is not blended."""
        return [POINTS_PER_UNIT * (self.all_seeds.score - rest.score) for rest in self.without]

    def state(self) -> dict[str, Any]:
        """Return the scores in types that `torch.load(weights_only=True)` accepts."""
        return {
            "all_seeds": list(self.all_seeds),
            "without": [list(score) for score in self.without],
            "fossilized": list(self.fossilized),
            "host_only": self.host_only and list(self.host_only),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Validation":
        """Return the validation of which `state` made plain data."""
        return cls(
            all_seeds=LossAndScore(*state["all_seeds"]),
            without=[LossAndScore(*score) for score in state["without"]],
            fossilized=LossAndScore(*state["fossilized"]),
            host_only=state["host_only"] and LossAndScore(*state["host_only"]),
        )


class TrainingStats(NamedTuple):
    """Statistics of one epoch of host training. Gradients are those of the last minibatch, before clipping."""

    loss: float  # mean over minibatches
    score: float  # mean over minibatches
    skipped_steps: int  # because gradients overflowed fp16
    host_gradient: GradientStats
    seed_gradients: list[GradientStats]  # [K]


class EpochResult(NamedTuple):
    """Results of one host epoch: training, then validation."""

    training: TrainingStats
    validation: Validation


@dataclass(kw_only=True)
class History:
    """Metrics of each epoch of the episode; validation loss and score also have an entry before the first epoch."""

    train_loss: list[float] = field(default_factory=list)
    train_score: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
