"""Fake CUDA streams and events: work runs at once, and vector clocks record the order that events would enforce."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

VectorClock = dict["Stream", int]
"""Number of pieces of work known to be done, by stream (a vector clock)."""


class Stream:
    """A queue of work."""

    n_created: int = 0

    def __init__(self, device: torch.device) -> None:
        Stream.n_created += 1
        self.device = device
        self.clock: VectorClock = {self: 0}
        self.log: list[Any] = []

    def work(self) -> int:
        """Add one piece of work and return its number."""
        self.clock[self] += 1
        return self.clock[self]

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.log.append(event)
        for stream, done in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), done)


class Event:
    """Event that holds its stream's vector clock at the time of recording."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: Stream) -> None:
        self.stream = stream
        self.clock = dict(stream.clock)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Work runs at once."""

    def elapsed_time(self, end: Event) -> float:
        return 1.0  # milliseconds


class FakeCuda:
    """Replacement of the streams and events of `torch.cuda`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        Stream.n_created = 0
        self.default: dict[torch.device, Stream] = {}
        self.entered: list[Stream] = []
        self.recorded: list[Stream] = []  # by Tensor.record_stream
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "current_stream", self.current)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: self.recorded.append(stream))

    def current(self, device: torch.device) -> Stream:
        if self.entered and self.entered[-1].device == device:
            return self.entered[-1]
        if device not in self.default:
            self.default[device] = Stream(device)
            Stream.n_created -= 1  # the default stream exists from the start
        return self.default[device]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.entered.append(stream)
        try:
            yield
        finally:
            self.entered.pop()

    def current_stream(self, device: torch.device) -> Stream:
        """Return the stream of the next operation on a device."""
        return self.entered[-1] if self.entered else self.current(device)


class MemoryBlock:
    """Memory of one tensor, and its uses."""

    def __init__(self, storage: torch.UntypedStorage, maker: Stream) -> None:
        self.weak = StorageWeakRef(storage)
        self.allocating_stream = maker
        self.written: tuple[Stream, int] | None = None  # last write
        self.used: dict[Stream, int] = {}  # last use by each stream

    def preceding_uses(self, changed: bool) -> list[tuple[Stream, int]]:
        """Return the uses that must precede a change of the memory, or a read of it."""
        return list(self.used.items()) if changed else [self.written] if self.written else []


class RaceDetector(TorchDispatchMode):
    """Finds unordered operations on the same memory, backward passes included, and memory reused too early.

    Memory is reused too early if torch gives it back to its stream while another stream still uses it.
    """

    def __init__(self, cuda: FakeCuda, device: torch.device) -> None:
        super().__init__()
        self.cuda, self.device = cuda, device
        self.blocks: dict[int, MemoryBlock] = {}  # by address
        self.shared: dict[Stream, set[MemoryBlock]] = {}  # by allocating stream: blocks that other streams use too
        self.operations = 0
        self.races: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stream = self.cuda.current_stream(self.device)
        now = stream.work()
        self.operations += 1
        given = dict(zip((a.name for a in function._schema.arguments), args, strict=False)) | kwargs
        for argument in function._schema.arguments:
            changed = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(given.get(argument.name)):
                self._touch(tensor, stream, now, changed, str(function))
        result = function(*args, **kwargs)
        inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors_in([args, kwargs])}
        for tensor in tensors_in(result):
            if tensor.untyped_storage().data_ptr() not in inputs:
                self._touch(tensor, stream, now, True, str(function))
        return result

    def _touch(self, tensor: Tensor, stream: Stream, now: int, changed: bool, what: str) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return
        block = self.blocks.get(storage.data_ptr())
        if block is None or block.weak.expired():
            self._check_freed(stream)
            block = self.blocks[storage.data_ptr()] = MemoryBlock(storage, stream)
        if stream is not block.allocating_stream:
            self.shared.setdefault(block.allocating_stream, set()).add(block)
        if any(stream.clock.get(other, 0) < then for other, then in block.preceding_uses(changed)):
            self.races.add(what)
        if changed:
            block.written, block.used = (stream, now), {}
        block.used[stream] = now

    def _check_freed(self, stream: Stream) -> None:
        for block in list(self.shared.get(stream, ())):
            if block.weak.expired():
                self.shared[stream].remove(block)
                if any(stream.clock.get(other, 0) < then for other, then in block.used.items()):
                    self.races.add("memory")


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
