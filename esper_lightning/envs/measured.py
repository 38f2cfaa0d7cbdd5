"""What is measured of a host."""

from dataclasses import dataclass, field
from typing import NamedTuple

from esper_lightning.growth.gradients import GradientStats


class Measured(NamedTuple):
    """What one host epoch and its validation showed, as Python numbers."""

    train_loss: float
    train_accuracy: float
    skipped_steps: int
    host_gradient: GradientStats
    seed_gradients: list[GradientStats]  # per slot
    loss: list[float]  # per variant: see `variants`
    accuracy: list[float]  # per variant


class Validated(NamedTuple):
    """The last validation, per variant: see `HostEnv.variants`."""

    loss: list[float]
    accuracy: list[float]


@dataclass
class History:
    """One entry per tick since the episode began; validation also has one from before the first tick."""

    train_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


def as_measured(validation: list[list[float]], slots: int, training: list[float] | None = None) -> Measured:
    """The executor's rows as one record; without `training`, of a host that has not trained yet."""
    loss, accuracy = validation
    size = len(GradientStats._fields)
    t = training or [0.0] * (3 + size * (1 + slots))
    host, *seeds = (GradientStats(*t[begin : begin + size]) for begin in range(3, len(t), size))
    return Measured(t[0], t[1], int(t[2]), host, seeds, loss, accuracy)
