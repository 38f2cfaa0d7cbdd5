"""Snapshot of a host's last good state, in reused memory so that repeated snapshots allocate nothing."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Alignment of tensors in bytes, so that the memory can be viewed as any dtype."""


CPU = torch.device("cpu")


class Snapshot:
    """Copy of a nested state of dicts, lists, numbers and tensors.

    Tensors are copied into a single buffer on the CPU, which is reallocated only for a larger state.

    Args:
        device: Device of the tensors. For a GPU the buffer is pinned and copies are asynchronous.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._stream = partial(torch.cuda.current_stream, device) if device.type == "cuda" else None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._state: Any = None
        self._copied: torch.Event | None = None

    def take(self, state: Any) -> None:
        """Replace the snapshot by a copy of `state`."""
        tensors = list(_tensors(state))
        # Indices of tensors that are copied together: each on the CPU alone, all of one dtype on a GPU by one transfer.
        groups: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
        for i, tensor in enumerate(tensors):
            groups.setdefault((tensor.device, tensor.dtype, i if tensor.device.type == "cpu" else -1), []).append(i)
        sizes = [sum(tensors[i].nbytes for i in group) for group in groups.values()]
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        if starts[-1] > len(self._memory):
            self._memory = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self._stream is not None)
        copies: dict[int, Tensor] = {}
        for (device, dtype, _), group, start, size in zip(groups, groups.values(), starts, sizes, strict=False):
            numbers = self._memory[start : start + size].view(dtype)
            parts = numbers.split([tensors[i].numel() for i in group])
            for i, part in zip(group, parts, strict=True):
                copies[i] = part.as_strided(tensors[i].shape, _dense_strides(tensors[i]))
                if device.type == "cpu":
                    copies[i].copy_(tensors[i].detach())
            if device.type != "cpu":
                numbers.copy_(torch.cat([_in_memory_order(tensors[i].detach()) for i in group]), non_blocking=True)
        in_order = (copies[i] for i in range(len(tensors)))
        self._state = _convert(state, lambda _: next(in_order))
        # Copies from a GPU are asynchronous; `view` waits for this event.
        self._copied = self._stream().record_event() if self._stream is not None else None

    def view(self) -> Any:
        """Return the snapshot; its tensors are views of the buffer, which the next `take` overwrites."""
        assert self._state is not None, "no snapshot has been taken"
        if self._copied is not None:
            self._copied.synchronize()
        return self._state

    def copy(self) -> Any:
        """Return a copy of the snapshot in memory of its own."""
        return clone_tensors(self.view())

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._memory.nbytes


def clone_tensors(state: Any) -> Any:
    """Return a copy of a nested state in which every tensor has memory of its own."""
    return _convert(state, Tensor.clone)


def pack(state: Any) -> Any:
    """Return a copy of a nested state whose tensors are parts of one memory for each data type and device.

    torch.save and torch.load spend far more time on a memory than on one of its tensors.
    """
    tensors = list(_tensors(state))
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(i)
    parts: dict[int, Tensor] = {}
    for group in groups.values():
        numbers = torch.cat([_in_memory_order(tensors[i].detach()) for i in group])
        for i, part in zip(group, numbers.split([tensors[i].numel() for i in group]), strict=True):
            parts[i] = part.as_strided(tensors[i].shape, _dense_strides(tensors[i]))
    in_order = (parts[i] for i in range(len(tensors)))
    return _convert(state, lambda _: next(in_order))


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)


def _convert(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of `state` with `change` applied to every tensor, in the order of `_tensors`."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, dict):
        return type(state)((key, _convert(value, change)) for key, value in state.items())
    if isinstance(state, list | tuple):
        return type(state)(_convert(value, change) for value in state)
    return state


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in one row, in the order of `_dense_strides`; a view if they leave no gaps."""
    strides = _dense_strides(tensor)
    dense = tensor if tensor.stride() == strides else tensor.contiguous()
    return dense.as_strided((tensor.numel(),), (1,))


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if they leave no gaps (as in channels_last), else contiguous ones."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
