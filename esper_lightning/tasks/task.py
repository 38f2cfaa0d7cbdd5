"""What hosts learn: data that lives on a device, and one function that measures outputs against targets."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Split(NamedTuple):
    """Samples and what should be said of them."""

    inputs: Tensor  # [samples, …]
    targets: Tensor  # [samples, …] int64

    def to(self, device: torch.device) -> "Split":
        return Split(self.inputs.to(device), self.targets.to(device))

    @property
    def samples(self) -> int:
        return self.inputs.shape[0]


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

    def to(self, device: torch.device) -> "TaskData":
        return TaskData(self.train.to(device), self.validation.to(device), self.test.to(device), self.classes)


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
        """Cross-entropy and accuracy: outputs [B, classes], targets [B]; or [B, T, classes] and [B, T]."""
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
        correct = (outputs.argmax(-1) == targets).to(loss.dtype)
        if targets.ndim == 1:
            return Measures(loss, correct)
        return Measures(loss.flatten(1).mean(1), correct.flatten(1).mean(1))
