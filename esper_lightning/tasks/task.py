"""What hosts learn: data that lives on a device, and one function that measures outputs against targets."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Split(NamedTuple):
    """Samples and what should be said of them."""

    inputs: Tensor  # [samples, …]
    targets: Tensor  # [samples, …] int64

    variants = 1  # of the same data, one behind the other: see VariedSplit

    def to(self, device: torch.device) -> "Split":
        return Split(self.inputs.to(device), self.targets.to(device))

    def of(self, variant: int) -> "Split":
        """One variant of the data, without a copy."""
        if self.variants == 1:
            return self
        return Split(*(part.unflatten(0, (self.variants, -1))[variant] for part in self))

    def spread(self, devices: Sequence[torch.device]) -> "Split":
        """With a copy kept on each of these devices."""
        if len(devices) == 1:
            return self.to(devices[0])
        copies = {device: self.to(device) for device in devices}
        split = SpreadSplit(*copies[devices[0]])
        split.copies, split.variants = copies, self.variants
        return split

    @property
    def samples(self) -> int:
        """Of one variant."""
        return self.inputs.shape[0] // self.variants


class VariedSplit(Split):
    """Several variants of the same number of samples: inputs and targets are [variants · samples, …]."""

    variants: int

    @classmethod
    def join(cls, variants: Sequence[Split]) -> "VariedSplit":
        """All of these, one behind the other."""
        split = cls(*(torch.cat(parts) for parts in zip(*variants, strict=True)))
        split.variants = len(variants)
        return split

    def to(self, device: torch.device) -> "VariedSplit":
        split = VariedSplit(*super().to(device))
        split.variants = self.variants
        return split


class SpreadSplit(Split):
    """Data on several devices: by itself the copy on the first, and `to` another one copies nothing."""

    copies: dict[torch.device, Split]

    def to(self, device: torch.device) -> Split:
        return self.copies[device] if device in self.copies else super().to(device)


class TaskData(NamedTuple):
    """A data set. Hosts learn from `train`, rewards come from `validation`, and only evaluations see `test`."""

    train: Split
    validation: Split
    test: Split
    classes: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch."""
        return tuple(self.train.inputs.shape[1:])

    def spread(self, devices: Sequence[torch.device]) -> "TaskData":
        """With one copy on each of these devices; what lies there already is not copied."""
        return TaskData(*(split.spread(devices) for split in self[:3]), self.classes)


class Measures(NamedTuple):
    """Per sample."""

    loss: Tensor  # [B] float
    correct: Tensor  # [B] float in 0 … 1: share of the sample's predictions that are right


class Task(ABC):
    """Where data comes from and how outputs are judged."""

    @abstractmethod
    def load(self) -> TaskData:
        """The whole data set, on the CPU. Raises ValueError, saying how to get it, if it is not there."""

    def measure(self, outputs: Tensor, targets: Tensor) -> Measures:
        """Cross-entropy and accuracy: outputs [B, classes], targets [B]; or [B, T, classes] and [B, T].

        In the outputs' precision, and in float32 at least: bf16 knows no share of right answers between 0.996 and 1.
        """
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
        correct = (outputs.argmax(-1) == targets).to(loss.dtype)
        if targets.ndim == 1:
            return Measures(loss, correct)
        return Measures(loss.flatten(1).mean(1), correct.flatten(1).mean(1))
