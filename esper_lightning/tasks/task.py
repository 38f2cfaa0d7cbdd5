"""Interface of tasks: data on a device, and a function that measures outputs against targets."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error
from torchmetrics.functional.regression import r2_score
from torchmetrics.functional.text import perplexity

MAX_RNG_SEED = 2**32 - 1
"""Largest RNG seed of generated data."""

CALIBRATION_BINS = 15
"""Number of bins of confidence in the calibration error, as in https://arxiv.org/abs/1706.04599."""


def check_data_seed(setting: str, rng_seed: int) -> None:
    """Raise ValueError, naming the setting, unless a number can be the RNG seed of generated data."""
    if not 0 <= rng_seed <= MAX_RNG_SEED:
        raise ValueError(f"{setting} must lie in 0 … {MAX_RNG_SEED}, got {rng_seed}")


class Split(NamedTuple):
    """Inputs and targets of one split of a data set."""

    inputs: Tensor  # [samples, …]
    targets: Tensor  # [samples, …] int64

    variants = 1  # number of variants, concatenated along the first axis: see VariedSplit

    def to(self, device: torch.device) -> "Split":
        return Split(self.inputs.to(device), self.targets.to(device))

    def variant(self, index: int) -> "Split":
        """Return one variant of the data as a view."""
        if self.variants == 1:
            return self
        return Split(*(part.unflatten(0, (self.variants, -1))[index] for part in self))

    def copy_to(self, devices: Sequence[torch.device]) -> "Split":
        """Return this split with a copy on each of these devices."""
        if len(devices) == 1:
            return self.to(devices[0])
        copies = {device: self.to(device) for device in devices}
        split = MultiDeviceSplit(*copies[devices[0]])
        split.copies, split.variants = copies, self.variants
        return split

    @property
    def samples(self) -> int:
        """Number of samples in one variant."""
        return self.inputs.shape[0] // self.variants


class VariedSplit(Split):
    """Several variants of a split with equal numbers of samples: inputs and targets are [variants · samples, …]."""

    variants: int

    @classmethod
    def join(cls, variants: Sequence[Split]) -> "VariedSplit":
        """Concatenate variants of a split."""
        split = cls(*(torch.cat(parts) for parts in zip(*variants, strict=True)))
        split.variants = len(variants)
        return split

    def to(self, device: torch.device) -> "VariedSplit":
        split = VariedSplit(*super().to(device))
        split.variants = self.variants
        return split


class MultiDeviceSplit(Split):
    """A split with a copy on each of several devices: its tensors are on the first, and `to` returns the other copies.

    Attributes:
        copies: The split on each device.
    """

    copies: dict[torch.device, Split]

    def to(self, device: torch.device) -> Split:
        return self.copies[device] if device in self.copies else super().to(device)


class TaskData(NamedTuple):
    """A data set. Hosts are trained on `train`, rewards come from `validation`, and only evaluations use `test`."""

    train: Split
    validation: Split
    test: Split
    classes: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch axis."""
        return tuple(self.train.inputs.shape[1:])

    def copy_to(self, devices: Sequence[torch.device]) -> "TaskData":
        """Return the data set with a copy on each of these devices; data already there are not copied."""
        train, validation, test = (split.copy_to(devices) for split in self[:3])
        return TaskData(train, validation, test, self.classes)


class Measures(NamedTuple):
    """Loss and accuracy of each sample in a batch."""

    loss: Tensor  # [B] float
    correct: Tensor  # [B] float in 0 … 1: share of correct predictions in the sample


class Task(ABC):
    """A data set and the measure of outputs on it."""

    @abstractmethod
    def load(self) -> TaskData:
        """Return the whole data set on the CPU. Raises ValueError with instructions if files are missing."""

    def measure(self, outputs: Tensor, targets: Tensor) -> Measures:
        """Return cross-entropy and accuracy per sample.

        Computed in the precision of the outputs, at least float32: bf16 has no value between 0.996 and 1.

        Args:
            outputs: Logits [B, classes] or [B, T, classes].
            targets: Class numbers [B] or [B, T].
        """
        # Executors need a number per sample, because a batch may hold several hosts or combinations of seeds. Means by
        # torchmetrics would also be slower: 1.5 times the processor time with its functions and 4.5 times with its
        # metric objects, which then add 12 % to the validation of a digits host.
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
        correct = (outputs.argmax(-1) == targets).to(loss.dtype)
        if targets.ndim == 1:
            return Measures(loss, correct)
        return Measures(loss.flatten(1).mean(1), correct.flatten(1).mean(1))

    def test_metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return further metrics of one host on the test split, by name.

        - Classes: `calibration_error`, the expected calibration error, which is the mean difference between confidence
          and accuracy (https://arxiv.org/abs/1706.04599); and `accuracy.<class>`, the accuracy on the samples of each
          class, NaN for a class without samples.
        - Tokens: `perplexity`, e to the mean cross-entropy per token.
        - Quantities: `r2`, the coefficient of determination; the mean over them if there are several.

        Args:
            outputs: Logits [samples, classes] or [samples, T, classes], or estimates [samples, quantities].
            targets: Class numbers [samples] or [samples, T], or quantities as floats, [samples] or like the outputs.
        """
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if targets.is_floating_point():
            return {"r2": r2_score(outputs.view_as(targets), targets).item()}
        if targets.ndim > 1:
            return {"perplexity": perplexity(outputs, targets).item()}
        classes = outputs.shape[-1]
        probabilities = outputs.softmax(-1)  # torchmetrics would take logits that all lie in [0, 1] for probabilities
        error = multiclass_calibration_error(probabilities, targets, classes, CALIBRATION_BINS)
        accuracies = multiclass_accuracy(probabilities, targets, classes, average=None)
        is_absent = torch.bincount(targets, minlength=classes) == 0
        shares = accuracies.masked_fill(is_absent, torch.nan).tolist()
        return {"calibration_error": error.item()} | {f"accuracy.{c}": share for c, share in enumerate(shares)}
