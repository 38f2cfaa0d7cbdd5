"""Minibatches: which samples are learned from, and how each is varied."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.tasks.augment import AugmentConfig, Choices, augment
from esper_lightning.tasks.task import Split


class Batches(NamedTuple):
    """The minibatches of a tick, [batches, B], or one of them, [B]."""

    indices: Tensor  # [..., B] int64: places in the training data
    choices: Choices  # [..., B, …]

    @classmethod
    def concatenate(cls, several: Sequence["Batches"]) -> "Batches":
        """As many minibatches, each with the samples of all in turn: N times [batches, B] -> [batches, N·B]."""
        samples = several[0].indices.ndim - 1  # the axis
        drawn = zip(*(batches.choices for batches in several), strict=True)
        return cls(
            torch.cat([batches.indices for batches in several], samples),
            Choices(*(None if parts[0] is None else torch.cat(parts, samples) for parts in drawn)),
        )

    def at(self, i: int) -> "Batches":  # [batches, B] -> [B]
        """The i-th minibatch."""
        return self._map(lambda part: part[i])

    def in_parts(self, number: int) -> "Batches":  # [batches, B] -> [batches · number, B / number]
        """Each minibatch as `number` smaller ones, one after the other."""
        return self._map(lambda part: part.unflatten(1, (number, -1)).flatten(0, 1))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batches":
        return Batches(change(self.indices), self.choices.map(change))


def fetch(data: Split, batch: Batches, config: AugmentConfig) -> Split:
    """The samples of one minibatch [B], varied as was drawn for them."""
    return Split(augment(data.inputs[batch.indices], batch.choices, config), data.targets[batch.indices])
