"""Task with the data of any LightningDataModule."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from esper_lightning.machine import total_memory
from esper_lightning.parallel import seeded_generators
from esper_lightning.tasks.task import Split, Task, TaskData

LOADERS = {"training": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}
"""Name of the loader method for each split."""

MAX_BATCHES = 100_000
"""Largest number of batches of a loader; larger batches hold more samples."""

MAX_MEMORY_SHARE = 0.25
"""Largest share of the machine's memory for the batches of a loader, which are copied once."""

RNG_SEED = 0
"""RNG seed for reading a data module, which may draw the order of samples and their augmentation."""


class FromDataModule(Task):
    """Classification with the data of a LightningDataModule, whose batches are pairs of inputs and class numbers.

    The data are read once and kept in memory on the hosts' device. A random transform is therefore applied only once;
    use data.env.training.augment for augmentation that differs each time.

    Args:
        data: Data module with loaders for training, validation and test.
        classes: Number of classes. None: one more than the largest class number in the data.
        test_share: Share of the validation data that becomes test data, for a data module without test data.
    """

    def __init__(self, data: LightningDataModule, classes: int | None = None, test_share: float | None = None) -> None:
        if classes is not None and classes < 2:
            raise ValueError(f"FromDataModule: classes must be at least 2, got {classes}")
        if test_share is not None and not 0.0 < test_share < 1.0:
            raise ValueError(f"FromDataModule: test_share must lie in (0, 1), got {test_share}")
        self.data = data
        self.classes = classes
        self.test_share = test_share

    def load(self) -> TaskData:
        kind = type(self.data).__name__
        wanted = [name for name in LOADERS if name != "test" or self.test_share is None]
        for name in wanted:
            if not is_overridden(LOADERS[name], self.data, LightningDataModule):
                hint = ", or set data.task.init_args.test_share" if name == "test" else ""
                raise ValueError(f"FromDataModule: {kind} has no {name} data; give it a {LOADERS[name]}{hint}")
        with seeded_generators(RNG_SEED):  # so that a resumed run has the same data
            self.data.prepare_data()
            self.data.setup("fit")
            if "test" in wanted:
                self.data.setup("test")
            train, validation, *rest = (
                concatenate_batches(getattr(self.data, LOADERS[name]), f"{kind}'s {name}") for name in wanted
            )
            if self.test_share is not None:
                validation, test = split_off(validation, self.test_share, kind)
                rest = [test]
        splits = (train, validation, *rest)
        classes_in_data = 1 + max(int(split.targets.max()) for split in splits)
        return TaskData(*splits, classes=self.classes or max(2, classes_in_data))


def concatenate_batches(make_loader: Callable[[], Any], source: str) -> Split:
    """Concatenate all batches of a loader.

    Raises ValueError unless they are pairs of inputs and class numbers, or if they do not come to an end.
    """
    loader = make_loader()
    if not isinstance(loader, Iterable):
        raise ValueError(f"FromDataModule: {source} loader is a {type(loader).__name__}, which has no batches")
    batches: list[Any] = []
    size = 0
    for batch in loader:
        check_batch(batch, source)
        batches.append(batch)
        size += sum(part.nbytes for part in batch)
        if len(batches) > MAX_BATCHES or size > MAX_MEMORY_SHARE * total_memory():
            raise ValueError(
                f"FromDataModule: {source} data have no end after {len(batches)} batches of {size / 2**30:.1f} GiB "
                f"together; give a loader that ends, with at most {MAX_BATCHES} batches in a quarter of the memory"
            )
    if not batches:
        raise ValueError(f"FromDataModule: {source} data are empty")
    shapes = {tuple(inputs.shape[1:]) for inputs, _ in batches}
    if len(shapes) > 1:
        raise ValueError(f"FromDataModule: {source} inputs have several shapes, {sorted(shapes)}; bring them to one")
    shapes = {tuple(targets.shape[1:]) for _, targets in batches}
    if len(shapes) > 1:
        raise ValueError(f"FromDataModule: {source} targets have several shapes, {sorted(shapes)}; bring them to one")
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return Split(inputs.float() if inputs.is_floating_point() else inputs.long(), targets.long())


def check_batch(batch: Any, source: str) -> None:
    """Raise ValueError unless `batch` is a pair of inputs [B, …] and class numbers [B] or [B, T]."""
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        parts = [type(part).__name__ for part in batch] if isinstance(batch, list | tuple) else type(batch).__name__
        raise ValueError(f"FromDataModule: {source} batches must be pairs of tensors, inputs and targets, got {parts}")
    inputs, targets = batch
    if inputs.is_complex():
        raise ValueError(f"FromDataModule: {source} inputs are complex; give real numbers")
    if inputs.dtype in (torch.uint8, torch.bool):
        raise ValueError(
            f"FromDataModule: {source} inputs are {inputs.dtype}; give numbers (float32) or tokens (int64)"
        )
    if targets.is_floating_point():
        raise ValueError(f"FromDataModule: {source} targets are {targets.dtype}; give the number of the class, int64")
    if targets.ndim not in (1, 2) or inputs.ndim < 2 or len(inputs) != len(targets):
        raise ValueError(
            f"FromDataModule: {source} batches are {list(inputs.shape)} and {list(targets.shape)}; they need inputs "
            f"[B, …] and class numbers [B], or [B, T] for tokens"
        )
    if targets.ndim == 2 and targets.shape[1] != inputs.shape[1]:
        raise ValueError(
            f"FromDataModule: {source} targets are {list(targets.shape)}, which is no class number for each sample; "
            f"take the argmax of one-hot targets"
        )


def split_off(split: Split, share: float, kind: str) -> tuple[Split, Split]:
    """Split off a random share of the samples and return the rest and the share.

    Raises ValueError if one of the two would be empty.
    """
    order = torch.randperm(split.samples)
    split_off_samples = round(share * split.samples)
    if not 0 < split_off_samples < split.samples:
        raise ValueError(
            f"FromDataModule: a share of {share} of {kind}'s {split.samples} validation samples is {split_off_samples}"
        )
    return Split(*(part[order[split_off_samples:]] for part in split)), Split(
        *(part[order[:split_off_samples]] for part in split)
    )
