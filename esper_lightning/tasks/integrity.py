"""Validation and fingerprint of a data set, checked before any training."""

import zlib

import torch
from torch import Tensor

from esper_lightning.tasks.task import Measures, TaskData

SPLITS = ("train", "validation", "test")

MAX_CLASSES = 100_000
"""Largest number of classes. Hosts have an output for each, so one mistaken label could take gigabytes."""


def check_data(data: TaskData, task: str) -> None:
    """Raise ValueError, naming the split and the first invalid sample, unless hosts can learn from `data`."""
    if data.classes > MAX_CLASSES:
        raise ValueError(f"task {task} has {data.classes} classes, more than {MAX_CLASSES}; correct its labels")
    for name, (inputs, targets) in zip(SPLITS, data[:3], strict=True):
        where = f"task {task}: its {name} data"
        if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
            raise ValueError(f"{where} are {type(inputs).__name__} and {type(targets).__name__}; give tensors")
        if inputs.is_complex():
            raise ValueError(f"{where} have complex inputs; give real numbers, such as real and imaginary parts")
        if inputs.ndim > 3 and not inputs.is_floating_point():
            raise ValueError(f"{where} have images of {inputs.dtype}; give floats, such as inputs.float() / 255")
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
        # Not >= classes: 256 is no number of uint8.
        invalid = ((targets < 0) | (targets > data.classes - 1)).flatten(1 if targets.ndim > 1 else 0)
        invalid = invalid.any(1) if targets.ndim > 1 else invalid
        if invalid.any():
            first = int(invalid.nonzero()[0])
            raise ValueError(
                f"{where} hold {int(invalid.sum())} targets outside of 0 … {data.classes - 1}, the first is number "
                f"{first}: {targets[first].flatten()[:8].tolist()}; correct `classes` or the targets, or get the data "
                "set again"
            )
    for what, is_constant in (("inputs", rows_are_equal), ("targets", elements_are_equal)):
        if is_constant(getattr(data.train, what)):
            raise ValueError(f"task {task}: all {what} of its training data are equal, so there is nothing to learn")


def check_outputs(outputs: object, classes: int) -> None:
    """Raise ValueError unless the outputs of a host have a number for each class."""
    if not isinstance(outputs, Tensor):
        raise ValueError(f"the host's forward returned a {type(outputs).__name__}; return a tensor of logits")
    if outputs.ndim < 2 or outputs.shape[-1] < classes:
        raise ValueError(
            f"the host's outputs have shape {tuple(outputs.shape)}, and the task has {classes} classes; end the host "
            "with as many outputs as its constructor is given"
        )


def check_measures(measures: Measures, samples: int, task: str) -> None:
    """Raise ValueError unless `measures` are a loss and a share of correct predictions for each sample."""
    for name in Measures._fields:
        values = getattr(measures, name, None)
        if not isinstance(values, Tensor) or values.shape != (samples,):
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise ValueError(
                f"task {task}: measure returned as {name} {got} for {samples} samples; return Measures of a number per "
                f"sample, of shape ({samples},), such as F.cross_entropy(…, reduction='none')"
            )


def find_doubts(data: TaskData, task: str) -> list[str]:
    """Return a line for each property of validation and test data that makes measurements on them doubtful."""
    doubts = []
    for name, (inputs, targets) in zip(SPLITS[1:], data[1:3], strict=True):
        where = f"task {task}: its {name} data"
        if len(inputs) == 1:
            doubts.append(f"{where} are one sample, so an accuracy on them is hardly a measurement")
        elif elements_are_equal(targets):
            doubts.append(f"{where} have one class, so a constant output is always right")
        elif rows_are_equal(inputs):
            doubts.append(f"{where} have equal inputs, so every network has the same output for all of them")
    return doubts


def rows_are_equal(values: Tensor) -> bool:  # [samples, …]
    """Return True if all samples are equal."""
    # In parts, since the first part usually answers the question.
    return all(torch.equal(part, values[:1].expand_as(part)) for part in values.split(256))


def elements_are_equal(values: Tensor) -> bool:
    """Return True if all elements of all samples are equal."""
    return rows_are_equal(values.flatten())


def fingerprint(data: TaskData) -> str:
    """Return a description like `897 + 200 + 700 samples of 10 classes, checksum 8d1f03aa`, the same on any device."""
    checksum = 0
    for split in data[:3]:
        for tensor in split:
            numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            checksum = zlib.crc32(numbers.numpy().data, checksum)
    sizes = " + ".join(str(split.samples) for split in data[:3])
    return f"{sizes} samples of {data.classes} classes, checksum {checksum:08x}"
