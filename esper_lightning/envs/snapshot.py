"""Copies of a host's state, with one memory for the tensors of each data type on each device.

Each tensor of a state costs a fixed time, and a tiny host has a hundred of them. `Snapshot` holds the last good state
in reused memory, so that repeated snapshots allocate nothing; `pack` makes the plain data of a checkpoint.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # of tensors in bytes, so that the memory can be viewed as any dtype

CPU = torch.device("cpu")

Kind = tuple[torch.device, torch.dtype]  # tensors of a kind share a memory

PLACEHOLDER = torch.empty(0)  # in a state that has been taken apart, in place of each of its tensors


class TensorSpec(NamedTuple):
    """Description of a tensor in a memory that it shares with others of its kind."""

    kind: Any  # device and dtype, or the index of these in a packed state
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Snapshot:
    """Copy of a nested state of dicts, lists, numbers and tensors in one buffer on the CPU, which only grows.

    `device` is that of the tensors; for a GPU the buffer is pinned and copies are asynchronous.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._stream = partial(torch.cuda.current_stream, device) if device.type == "cuda" else None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._template: Any = None
        self._specs: Sequence[TensorSpec] = ()
        self._numbers: dict[Kind, Tensor] = {}
        self._copied: torch.Event | None = None

    def take(self, state: Any) -> None:
        """Replace the snapshot by a copy of `state`, which must not contain tensors of `view`."""
        self._template, self._specs, rows = take_apart(state)
        sizes = [sum(row.nbytes for row in same) for same in rows.values()]
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        if starts[-1] > len(self._memory):
            self._memory = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self._stream is not None)
        self._numbers = {}
        for kind, start, size in zip(rows, starts, sizes, strict=False):
            device, dtype = kind
            self._numbers[kind] = numbers = self._memory[start : start + size].view(dtype)
            if device.type == "cpu":
                torch.cat(rows[kind], out=numbers)
            else:
                numbers.copy_(torch.cat(rows[kind]), non_blocking=True)
        # Copies from a GPU are asynchronous; `view` waits for this event.
        self._copied = self._stream().record_event() if self._stream is not None else None

    def view(self) -> Any:
        """Return the snapshot; its tensors are views of the buffer, which the next `take` overwrites."""
        assert self._template is not None, "no snapshot has been taken"
        if self._copied is not None:
            self._copied.synchronize()
        return put_together(self._template, self._specs, self._numbers)

    def copy(self) -> Any:
        """Return a copy of the snapshot in memory of its own."""
        return clone_tensors(self.view())

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._memory.nbytes


def pack(state: Any) -> dict[str, Any]:
    """Return a copy of a nested state of dicts, lists, numbers and tensors as plain data with few tensors on the CPU.

    `template` is the state with an empty tensor in place of each tensor, `numbers` has the elements of all tensors of a
    kind, and `layout` for each tensor the index of its kind, its shape and its strides.
    """
    template, specs, rows = take_apart(state)
    kinds = list(rows)
    return {
        "template": template,
        "layout": [(kinds.index(spec.kind), spec.shape, spec.strides) for spec in specs],
        "numbers": [torch.cat(rows[kind]).cpu() for kind in kinds],
    }


def unpack(packed: Any) -> Any:
    """Return the state of `pack`; its tensors are views of the packed memory. Raises ValueError if it is damaged."""
    try:
        specs = [TensorSpec(*spec) for spec in packed["layout"]]
        return put_together(packed["template"], specs, dict(enumerate(packed["numbers"])))
    except (KeyError, TypeError, AttributeError, RuntimeError, StopIteration) as error:
        raise ValueError(f"the state of a host is damaged: {error!r}") from error


def take_apart(state: Any) -> tuple[Any, list[TensorSpec], dict[Kind, list[Tensor]]]:
    """Return a nested state with a placeholder for every tensor, their descriptions in the order of the state, and the
    numbers of each tensor in one row, by kind; rows are views where they can be."""
    specs: list[TensorSpec] = []
    rows: dict[Kind, list[Tensor]] = {}

    def take_out(tensor: Tensor) -> Tensor:
        values = tensor.detach()
        if not (values.is_contiguous() or is_dense(values.shape, values.stride())):
            values = values.clone()
        kind = values.device, values.dtype
        specs.append(TensorSpec(kind, tuple(values.shape), values.stride()))
        rows.setdefault(kind, []).append(values.as_strided((values.numel(),), (1,)))
        return PLACEHOLDER

    return _convert(state, take_out), specs, rows


def put_together(template: Any, specs: Sequence[TensorSpec], numbers: Mapping[Any, Tensor]) -> Any:
    """Return the state of `take_apart` with its tensors as views of `numbers`, the joined rows of each kind."""
    ends = {kind: memory.storage_offset() for kind, memory in numbers.items()}
    tensors: list[Tensor] = []
    for kind, shape, strides in specs:
        tensors.append(numbers[kind].as_strided(shape, strides, ends[kind]))
        ends[kind] += math.prod(shape)
    in_order = iter(tensors)
    return _convert(template, lambda _: next(in_order))


def clone_tensors(state: Any) -> Any:
    """Return a copy of a nested state in which every tensor has memory of its own."""
    return _convert(state, Tensor.clone)


def _convert(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of `state` with `change` applied to every tensor, in the order of the state."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, dict):
        pairs = [(key, _convert(value, change)) for key, value in state.items()]
        return OrderedDict(pairs) if isinstance(state, OrderedDict) else dict(pairs)
    if isinstance(state, list | tuple):
        values = [_convert(value, change) for value in state]
        return tuple(values) if isinstance(state, tuple) else values
    return state


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if the elements of a tensor, which has some, fill a memory without gaps, in any order of axes."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
