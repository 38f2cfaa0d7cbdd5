"""Packed states of hosts: a template, and one memory for the tensors of each data type on each device.

Saving, loading and sending a state takes a fixed time for each of its tensors, and a host of a few hundred parameters
has a hundred of them.
"""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from esper_lightning.governor.snapshot import TensorSpec, is_dense, put_together, take_apart
from esper_lightning.growth.nested import iter_tensors
from esper_lightning.serialization import check_keys

PACKED_KEYS = ("template", "layout", "numbers")

MAX_AXES = 64
"""Largest number of axes of a tensor that torch's operations accept."""


def pack(state: Any) -> dict[str, Any]:
    """Return a copy of a nested state of dicts, lists, numbers and tensors as plain data with few tensors.

    The key `template` has the state with an empty tensor in place of each tensor, `numbers` the elements of all tensors
    of a kind (a data type on a device), and `layout` for each tensor the index of its kind, its number of axes, its
    shape and its strides.
    """
    template, specs, rows = take_apart(state)
    kinds = list(rows)
    layout = [[kinds.index(kind), len(shape), *shape, *strides] for kind, shape, strides in specs]
    return {
        "template": template,
        "layout": torch.tensor(list(chain.from_iterable(layout)), dtype=torch.int64),
        "numbers": [torch.cat(list(rows[kind])) for kind in kinds],
    }


def unpack(packed: Any) -> Any:
    """Return the state of `pack`; its tensors are views of the packed memory. Raises ValueError if it is damaged."""
    check_keys("a host", packed, PACKED_KEYS)
    numbers, layout = packed["numbers"], packed["layout"]
    if not isinstance(numbers, list) or not all(isinstance(one, Tensor) and one.is_contiguous() for one in numbers):
        raise ValueError("a host's numbers are no list of tensors")
    if not isinstance(layout, Tensor) or layout.dtype != torch.int64 or layout.ndim != 1:
        raise ValueError("the layout of a host's tensors is no row of whole numbers")
    specs, ends = list(_read_layout(layout.tolist(), len(numbers))), [0] * len(numbers)
    for spec in specs:
        ends[spec.kind] += math.prod(spec.shape)
    if ends != [one.numel() for one in numbers]:
        raise ValueError("a host's tensors are not as large as their numbers")
    if (found := sum(1 for _ in iter_tensors(packed["template"]))) != len(specs):
        raise ValueError(f"a host's state has {found} tensors, its layout {len(specs)}")
    return put_together(packed["template"], specs, dict(enumerate(numbers)))


def _read_layout(layout: list[int], kinds: int) -> Iterator[TensorSpec[int]]:
    """Yield the descriptions of tensors. Raises ValueError unless the numbers of each lie side by side."""
    at = 0
    while at < len(layout):
        axes = layout[at + 1] if at + 1 < len(layout) else -1
        end = at + 2 + 2 * axes
        damaged = not 0 <= axes <= MAX_AXES or end > len(layout) or not 0 <= layout[at] < kinds
        if damaged or min(layout[at:end]) < 0:
            raise ValueError(f"the layout of a host's tensors is damaged at number {at}")
        shape, strides = layout[at + 2 : at + 2 + axes], layout[at + 2 + axes : end]
        if not (math.prod(size for size in shape if size) < 2**63 if 0 in shape else is_dense(shape, strides)):
            raise ValueError(f"a host's tensor of shape {shape} has strides {strides}, which leave gaps or overlap")
        yield TensorSpec(layout[at], tuple(shape), tuple(strides))
        at = end
