"""Packed states of hosts: a template, and one memory for the tensors of each data type.

Saving, loading and sending a state takes a fixed time for each of its tensors, and a host of a few hundred parameters
has a hundred of them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from esper_lightning.governor.snapshot import TensorSpec, put_together, take_apart
from esper_lightning.growth.nested import iter_tensors
from esper_lightning.serialization.checks import check_count, check_keys

PACKED_KEYS = ("template", "tensors", "numbers")


def pack(state: Any) -> dict[str, Any]:
    """Return a copy of a nested state of dicts, lists, numbers and tensors as plain data with few tensors."""
    template, specs, rows = take_apart(state)
    kinds = list(rows)
    return {
        "template": template,
        "tensors": [[kinds.index(kind), list(shape), list(strides)] for kind, shape, strides in specs],
        "numbers": [torch.cat(list(rows[kind])) for kind in kinds],
    }


def unpack(packed: Any) -> Any:
    """Return the state of `pack`; its tensors are views of the packed memory. Raises ValueError if it is damaged.

    States of older checkpoints are not packed; they are returned as they are.
    """
    if isinstance(packed, Mapping) and PACKED_KEYS[0] not in packed:
        return packed
    check_keys("a host", packed, PACKED_KEYS)
    numbers, described = packed["numbers"], packed["tensors"]
    if not isinstance(numbers, list) or not all(isinstance(one, Tensor) and one.is_contiguous() for one in numbers):
        raise ValueError("a host's numbers are no list of tensors")
    if not isinstance(described, list):
        raise ValueError("a host's tensors are not described")
    specs, ends = [], [0] * len(numbers)
    for description in described:
        spec = _check_description(description, len(numbers))
        ends[spec.kind] += math.prod(spec.shape)
        specs.append(spec)
    if ends != [one.numel() for one in numbers]:
        raise ValueError("a host's tensors are not as large as their numbers")
    if (found := sum(1 for _ in iter_tensors(packed["template"]))) != len(specs):
        raise ValueError(f"a host's state has {found} tensors, {len(specs)} are described")
    return put_together(packed["template"], specs, dict(enumerate(numbers)))


def _check_description(description: Any, kinds: int) -> TensorSpec[int]:
    """Return the description of a tensor. Raises ValueError unless its numbers lie side by side."""
    if not isinstance(description, list) or len(description) != 3:
        raise ValueError("a host's tensor is not described by kind, shape and strides")
    kind, shape, strides = description
    if not isinstance(shape, list) or not isinstance(strides, list) or len(shape) != len(strides):
        raise ValueError("a host's tensor has no shape with as many strides")
    for number in (*shape, *strides):
        check_count("a size or stride of a host's tensor", number)
    if kinds == 0:
        raise ValueError("a host's tensor has no numbers")
    check_count("the kind of a host's tensor", kind, kinds - 1)
    if not _is_dense(shape, strides):
        raise ValueError(f"a host's tensor of shape {shape} has strides {strides}, which leave gaps or overlap")
    return TensorSpec(kind, tuple(shape), tuple(strides))


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if the elements of a tensor with these strides fill a memory without gaps, in any order of axes."""
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
