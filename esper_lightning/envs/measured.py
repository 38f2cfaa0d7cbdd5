"""Measurements of a host: what one host epoch and one validation pass showed, as Python numbers. K slots."""

from dataclasses import dataclass, field
from typing import NamedTuple

from esper_lightning.growth.gradients import GradientStats

POINTS = 100.0
"""Accuracy points in an accuracy of 1."""


class Score(NamedTuple):
    """Mean loss, and accuracy in 0 … 1, over one split of the data."""

    loss: float
    accuracy: float


class Validation(NamedTuple):
    """Scores of one host in one validation pass, by the seeds that take part. Seeds that are not blended never do."""

    all_seeds: Score
    without: list[Score]
    """Leave-one-out, [K]: every seed but the one in this slot."""
    committed: Score
    """Fossilized seeds only: what remains at the horizon."""
    host_only: Score | None = None
    """Every seed switched off. None: not asked for."""

    @property
    def contributions(self) -> list[float]:
        """Accuracy points of 100 that depend on the seed in each slot, [K]; 0 for a seed that is not blended."""
        return [POINTS * (self.all_seeds.accuracy - rest.accuracy) for rest in self.without]


class TrainingStats(NamedTuple):
    """Statistics of one epoch of host training. Gradients are those of the last minibatch, before clipping."""

    loss: float
    """Mean over minibatches."""
    accuracy: float
    """Mean over minibatches, 0 … 1."""
    skipped_steps: int
    """Optimizer steps that were not taken because gradients left fp16's range."""
    host_gradient: GradientStats
    seed_gradients: list[GradientStats]
    """One for the seed in each slot, [K]."""


class EpochResult(NamedTuple):
    """Results of one host epoch: training, then validation."""

    training: TrainingStats
    validation: Validation


@dataclass
class History:
    """One entry per tick since the episode began; validation also has one from before the first tick."""

    train_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
