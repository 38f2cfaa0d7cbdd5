"""Handwritten digits from scikit-learn: 1,797 real images of 8×8 pixels, without a download."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from esper_lightning.tasks.task import Split, Task, TaskData

SPLIT_RNG_SEED = 0
"""RNG seed of the split, which is the same in every run."""


class Digits(Task):
    """Classification of ten digits (https://archive.ics.uci.edu/dataset/80), with splits stratified by class.

    Args:
        validation: Number of images for rewards and observations.
        test: Number of images for evaluations only.
    """

    def __init__(self, validation: int = 200, test: int = 700) -> None:
        self.validation = validation
        self.test = test
        if min(validation, test) < 10 or validation + test > 1787:
            raise ValueError(
                f"digits: validation and test need at least 10 images each and must leave 10 of 1,797 for training, "
                f"got {validation} and {test}"
            )

    def load(self) -> TaskData:
        images, digits = load_digits(return_X_y=True)
        rest, test = _split(range(len(digits)), digits, self.test)
        train, validation = _split(rest, digits, self.validation)
        pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
        mean, deviation = pixels[train].mean(), pixels[train].std()
        inputs, targets = (pixels - mean) / deviation, torch.tensor(digits, dtype=torch.int64)
        splits = [Split(inputs[part], targets[part]) for part in (train, validation, test)]
        return TaskData(*splits, classes=10)


def _split(indices: Sequence[int], digits: np.ndarray, held_out: int) -> tuple[list[int], list[int]]:
    labels = [digits[i] for i in indices]
    parts: list[Any] = train_test_split(list(indices), test_size=held_out, random_state=SPLIT_RNG_SEED, stratify=labels)
    return parts[0], parts[1]
