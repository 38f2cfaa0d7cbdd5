"""A metric of the user as deciders see it: an accuracy from 0 to 1, and contributions in points of 100."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning.pytorch.utilities import rank_zero_warn

from esper_lightning.envs.measurements import POINTS_PER_UNIT, History, Score, Validation

MIN_ACCURACY = 1e-6
"""Least share of which a logarithm is taken, and least loss by which a difference is divided."""

MAX_VISIBLE_LOSS = 7.0
"""Largest loss whose exp(-loss) is about a thousandth or more, so that deciders see it fall."""


STUCK_TICKS, STUCK_POINTS = 10, 2.0
"""Ticks after which a metric should have improved, and by how much: in points of 100, or for a loss in percent."""


class Measured(NamedTuple):
    """Measurements of a validation, kept until the next training batch begins."""

    metric: float
    loss: float | None
    contributions: dict[str, float]
    potentials: dict[str, float]


class Scale(NamedTuple):
    """Meaning of a metric."""

    monitor: str
    mode: Literal["max", "min"]

    @property
    def unit(self) -> str:
        """Unit of contributions."""
        return "points" if self.mode == "max" else "% of the loss"

    def points(self, better: float, worse: float) -> float:
        """Return by how much one metric is better than another: in points of 100, or for a loss in percent.

        A metric that is not finite is worse than any other by 100.
        """
        if not (math.isfinite(better) and math.isfinite(worse)):
            return POINTS_PER_UNIT * (math.isfinite(better) - math.isfinite(worse))
        if self.mode == "max":
            return POINTS_PER_UNIT * (better - worse)
        return POINTS_PER_UNIT * (worse - better) / max(abs(worse), MIN_ACCURACY)

    def accuracy(self, metric: float) -> float:
        """Return the metric as a number from 0 to 1 that grows with quality; 0 for one that is not finite.

        Raises ValueError if a metric of mode `max` is no share.
        """
        if not math.isfinite(metric):
            return 0.0
        if self.mode == "min":
            return math.exp(-max(metric, 0.0))
        if not 0.0 <= metric <= 1.00001:  # sums of shares are rounded
            raise ValueError(
                f"Grow: {self.monitor} is {metric:.4g}, but in mode 'max' it must be a share from 0 to 1; scale it, or "
                f"monitor a loss with mode 'min'"
            )
        return min(metric, 1.0)

    def warn_if_blind(self, metric: float) -> None:
        """Warn if deciders see a loss as an accuracy that hardly moves: of 0 for a large loss, or of 1 below 0."""
        if self.mode == "min" and math.isfinite(metric) and not 0.0 <= metric <= MAX_VISIBLE_LOSS:
            rank_zero_warn(
                f"Grow: {self.monitor} is {metric:.4g}, and deciders see exp(-loss) as the accuracy, "
                f"{self.accuracy(metric):.2g}; log a loss from 0 to {MAX_VISIBLE_LOSS:g} for Grow, such as a share of "
                f"the first one"
            )

    def warn_if_stuck(self, history: History) -> None:
        """Warn once if the metric has hardly improved since training began."""
        first, *others = history.accuracy if self.mode == "max" else history.loss
        best = max(others) if self.mode == "max" else min(others)
        if len(others) == STUCK_TICKS and self.points(best, first) < STUCK_POINTS:
            name = self.monitor if self.mode == "max" else "the validation loss"
            rank_zero_warn(
                f"Grow: in {STUCK_TICKS} ticks {name} came from {first:.4g} no further than {best:.4g}; growth "
                f"does not help a network that does not learn: check data, loss and learning rate"
            )

    def validation(self, measured: Measured, slots: Sequence[str]) -> Validation:
        """Return a validation in the form in which deciders see it."""
        accuracy, loss = self.accuracy(measured.metric), measured.loss
        if loss is None:
            loss = measured.metric if self.mode == "min" else -math.log(max(accuracy, MIN_ACCURACY))

        def moved(points: float) -> Score:
            return Score(loss, accuracy + points / POINTS_PER_UNIT)

        without = [moved(-measured.contributions.get(name, 0.0)) for name in slots]
        trials = [moved(measured.potentials.get(name, 0.0)) for name in slots]
        return Validation(all_seeds=moved(0.0), without=without, fossilized=moved(0.0), trials=trials)
