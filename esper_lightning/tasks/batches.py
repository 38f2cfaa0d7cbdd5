"""Minibatches: indices of samples, and the augmentation of each."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.tasks.augment import AugmentConfig, AugmentParams, augment
from esper_lightning.tasks.task import Split


class Batches(NamedTuple):
    """The minibatches of one environment step, [batches, B], or a single minibatch, [B]."""

    indices: Tensor  # [..., B] int64: indices into the training data
    augment_params: AugmentParams  # [..., B, …]

    @classmethod
    def concatenate(cls, all_batches: Sequence["Batches"]) -> "Batches":
        """Concatenate minibatches of N hosts along the sample axis: N times [batches, B] -> [batches, N·B]."""
        sample_axis = all_batches[0].indices.ndim - 1  # the sample axis
        drawn = zip(*(batches.augment_params for batches in all_batches), strict=True)
        return cls(
            torch.cat([batches.indices for batches in all_batches], sample_axis),
            AugmentParams(*(None if parts[0] is None else torch.cat(parts, sample_axis) for parts in drawn)),
        )

    def minibatch(self, i: int) -> "Batches":  # [batches, B] -> [B]
        """Return the i-th minibatch."""
        return self._map(lambda part: part[i])

    def split(self, number: int) -> "Batches":  # [batches, B] -> [batches · number, B / number]
        """Split each minibatch into `number` smaller ones, in order."""
        return self._map(lambda part: part.unflatten(1, (number, -1)).flatten(0, 1))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batches":
        return Batches(change(self.indices), self.augment_params.map(change))


def fetch(data: Split, batch: Batches, config: AugmentConfig) -> Split:
    """Return the augmented samples of one minibatch [B]."""
    return Split(augment(data.inputs[batch.indices], batch.augment_params, config), data.targets[batch.indices])
