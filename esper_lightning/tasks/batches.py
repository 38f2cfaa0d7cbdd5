"""Minibatches: indices of samples, and the augmentation of each."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.tasks.augment import AugmentConfig, Choices, augment
from esper_lightning.tasks.task import Split


class Batches(NamedTuple):
    """The minibatches of one environment step, [batches, B], or a single minibatch, [B]."""

    indices: Tensor  # [..., B] int64: indices into the training data
    choices: Choices  # [..., B, …]

    @classmethod
    def concatenate(cls, several: Sequence["Batches"]) -> "Batches":
        """Concatenate minibatches of N hosts along the sample axis: N times [batches, B] -> [batches, N·B]."""
        samples = several[0].indices.ndim - 1  # the sample axis
        drawn = zip(*(batches.choices for batches in several), strict=True)
        return cls(
            torch.cat([batches.indices for batches in several], samples),
            Choices(*(None if parts[0] is None else torch.cat(parts, samples) for parts in drawn)),
        )

    def at(self, i: int) -> "Batches":  # [batches, B] -> [B]
        """Return the i-th minibatch."""
        return self._map(lambda part: part[i])

    def in_parts(self, number: int) -> "Batches":  # [batches, B] -> [batches · number, B / number]
        """Split each minibatch into `number` smaller ones, in order."""
        return self._map(lambda part: part.unflatten(1, (number, -1)).flatten(0, 1))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batches":
        return Batches(change(self.indices), self.choices.map(change))


def fetch(data: Split, batch: Batches, config: AugmentConfig) -> Split:
    """Return the augmented samples of one minibatch [B]."""
    return Split(augment(data.inputs[batch.indices], batch.choices, config), data.targets[batch.indices])
