"""Task with the data of any LightningDataModule."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from esper_lightning.parallel import seeded_generators
from esper_lightning.tasks.task import Split, Task, TaskData

LOADERS = {"training": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}
"""Name of the loader method for each split."""

RNG_SEED = 0
"""RNG seed for reading a data module, which may draw the order of samples and their augmentation."""


class FromDataModule(Task):
    """Classification with the data of a LightningDataModule, whose batches are pairs of inputs and class numbers.

    The data are read once and kept in memory on the hosts' device. A random transform is therefore applied only once;
    use data.env.training.augment for augmentation that differs each time.

    Args:
        data: Data module with loaders for training, validation and test.
        classes: Number of classes. None: one more than the largest class number in the data.
    """

    def __init__(self, data: LightningDataModule, classes: int | None = None) -> None:
        self.data = data
        self.classes = classes

    def load(self) -> TaskData:
        kind = type(self.data).__name__
        for name, loader in LOADERS.items():
            if not is_overridden(loader, self.data, LightningDataModule):
                raise ValueError(f"FromDataModule: {kind} has no {name} data; give it a {loader}")
        with seeded_generators(RNG_SEED):  # so that a resumed run has the same data
            self.data.prepare_data()
            self.data.setup("fit")
            self.data.setup("test")
            splits = [concatenate(getattr(self.data, loader)(), f"{kind}'s {name}") for name, loader in LOADERS.items()]
        classes_in_data = 1 + max(int(split.targets.max()) for split in splits if split.samples)
        return TaskData(*splits, classes=self.classes or max(2, classes_in_data))


def concatenate(batches: Iterable[Any], source: str) -> Split:
    """Concatenate all batches of a loader. Raises ValueError unless they are pairs of inputs and class numbers."""
    pairs: list[Any] = list(batches)
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
            raise ValueError(f"FromDataModule: {source} batches must be pairs of tensors, inputs and class numbers")
        inputs, targets = pair
        if inputs.dtype in (torch.uint8, torch.bool) or inputs.is_complex() or targets.is_floating_point():
            raise ValueError(
                f"FromDataModule: {source} batches are {inputs.dtype} and {targets.dtype}; give numbers (float32) or "
                "tokens (int64), and class numbers (int64)"
            )
        if targets.ndim not in (1, 2) or inputs.ndim < 2 or inputs.shape[: targets.ndim] != targets.shape:
            raise ValueError(
                f"FromDataModule: {source} batches are {list(inputs.shape)} and {list(targets.shape)}; they need "
                "inputs [B, …] and class numbers [B], or [B, T] for tokens"
            )
    if len({(inputs.shape[1:], targets.shape[1:]) for inputs, targets in pairs}) != 1:
        raise ValueError(f"FromDataModule: {source} data are empty or of several shapes; bring them to one")
    inputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return Split(inputs.float() if inputs.is_floating_point() else inputs.long(), targets.long())
