"""Validation and fingerprint of a data set, checked before any training."""

import zlib

import torch

from esper_lightning.tasks.task import TaskData

SPLITS = ("train", "validation", "test")


def check_data(data: TaskData, task: str) -> None:
    """Raise ValueError, naming the split and the first invalid sample, unless hosts can learn from `data`."""
    for name, (inputs, targets) in zip(SPLITS, data[:3], strict=True):
        where = f"task {task}: its {name} data"
        if len(inputs) != len(targets):
            raise ValueError(f"{where} have {len(inputs)} inputs and {len(targets)} targets; get the data set again")
        if len(inputs) == 0:
            raise ValueError(f"{where} are empty; get the data set again, or choose another split")
        if inputs.shape[1:] != data.train.inputs.shape[1:]:
            raise ValueError(
                f"{where} have inputs of shape {tuple(inputs.shape[1:])}, the training data {data.input_shape}"
            )
        if inputs.is_floating_point():
            invalid = ~inputs.isfinite().flatten(1).all(1)
            if invalid.any():
                raise ValueError(
                    f"{where} hold {int(invalid.sum())} inputs that are not finite, the first is number "
                    f"{int(invalid.nonzero()[0])}; get the data set again"
                )
        if targets.is_floating_point():
            raise ValueError(f"{where} have targets of {targets.dtype}; give the number of the class, int64")
        invalid = ((targets < 0) | (targets >= data.classes)).flatten(1 if targets.ndim > 1 else 0)
        invalid = invalid.any(1) if targets.ndim > 1 else invalid
        if invalid.any():
            first = int(invalid.nonzero()[0])
            raise ValueError(
                f"{where} hold {int(invalid.sum())} targets outside of 0 … {data.classes - 1}, the first is number "
                f"{first}: {targets[first].flatten()[:8].tolist()}; get the data set again"
            )


def fingerprint(data: TaskData) -> str:
    """Return a description like `897 + 200 + 700 samples of 10 classes, checksum 8d1f03aa`, the same on any device."""
    checksum = 0
    for split in data[:3]:
        for tensor in split:
            numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            checksum = zlib.crc32(numbers.numpy().data, checksum)
    sizes = " + ".join(str(split.samples) for split in data[:3])
    return f"{sizes} samples of {data.classes} classes, checksum {checksum:08x}"
