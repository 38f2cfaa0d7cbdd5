"""Ramps of alpha, the weight of a seed's output in the host's feature."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from esper_lightning.blueprints import suggest_name

Curve = Literal["linear", "cosine", "sigmoid6", "sigmoid12", "sigmoid24"]


def sigmoid_curve(progress: float, steepness: float) -> float:
    """Return a logistic curve rescaled to pass through (0, 0) and (1, 1); the plain one would jump at both ends."""

    def logistic(p: float) -> float:
        return 1.0 / (1.0 + math.exp(-steepness * (p - 0.5)))

    low, high = logistic(0.0), logistic(1.0)
    return (logistic(progress) - low) / (high - low)


CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 - 0.5 * math.cos(math.pi * progress),
    "sigmoid6": lambda progress: sigmoid_curve(progress, 6.0),
    "sigmoid12": lambda progress: sigmoid_curve(progress, 12.0),
    "sigmoid24": lambda progress: sigmoid_curve(progress, 24.0),
}


class Ramp(NamedTuple):
    """Monotone path of alpha from `start` to `target` over `ticks` host epochs."""

    start: float
    target: float
    ticks: int
    curve: Curve

    def value(self, tick: int) -> float:
        """Return alpha after `tick` host epochs of the ramp: exactly `start` at 0, exactly `target` at the end."""
        if tick <= 0:
            return self.start
        if tick >= self.ticks:
            return self.target
        return self.start + (self.target - self.start) * CURVES[self.curve](tick / self.ticks)


def check_ramp(ramp: Ramp) -> Ramp:
    """Return the ramp. Raises ValueError if its curve, length or range of alpha is invalid."""
    if ramp.curve not in CURVES:
        raise ValueError(f"unknown curve {ramp.curve!r}; {suggest_name(ramp.curve, list(CURVES))}")
    if type(ramp.ticks) is not int or ramp.ticks < 0:
        raise ValueError(f"a ramp takes a whole number of ticks, at least 0, got {ramp.ticks}")
    if not (0.0 <= ramp.start <= 1.0 and 0.0 <= ramp.target <= 1.0):
        raise ValueError(f"alpha must lie in [0, 1], got a ramp from {ramp.start} to {ramp.target}")
    return ramp


DEFAULT_RAMP = Ramp(start=0.0, target=1.0, ticks=1, curve="linear")
"""Ramp of an empty slot: a valid placeholder that is never followed."""
