"""Imitated CUDA graphs: operations are recorded with the memory of their operands, and a replay runs them again there.

As on a GPU, a capture computes nothing: what it changed is restored at its end, and the memory that it took holds NaN.
A graph keeps the memory that was taken within its capture, and no other: a replay that would use memory that has been
freed is an error. A capture refuses what CUDA refuses: the default stream, every wait, a transfer between processor and
GPU, a timed event, a generator that is not registered; and torch, a memory pool whose graphs are all gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from tests.envs.execution.fake_cuda import tensors_in

REFUSAL = "operation not permitted when stream is capturing"


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run operations without any imitation."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


@dataclass(frozen=True)
class Operand:
    """A tensor by the place of its numbers in memory."""

    memory: torch.UntypedStorage | StorageWeakRef
    """Memory of the graph, or a reference to other memory, which does not keep it."""
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Return a tensor of the numbers that are there now."""
        storage = self.memory
        if isinstance(storage, StorageWeakRef):
            storage = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
            assert storage is not None, "a replay would use memory that has been freed"
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.strides)


@dataclass(frozen=True)
class Operation:
    """A recorded operation."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[Operand]

    def run(self) -> None:
        """Run the operation on the same memory, and write new results to where they were."""
        args, kwargs = tree_map_only(Operand, lambda operand: operand.tensor(), (self.args, self.kwargs))
        results = list(tensors_in(self.function(*args, **kwargs)))
        for result, place in zip(results, self.results, strict=True):
            target = place.tensor()
            if result.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
                target.copy_(result)


class ImitatedGraph:
    """Replacement of `torch.cuda.CUDAGraph`.

    Args:
        gpu: The `ImitatedGpu`.
    """

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu
        self.generators: list[torch.Generator] = []
        self.operations: list[Operation] = []
        self.mode: Recorder | None = None
        self.replays = 0

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert self.gpu.cuda.entered, "CUDA does not capture the default stream"
        assert self.gpu.capturing is None, "one capture at a time"
        if pool is not None:
            if pool in self.gpu.graph_pools and not self.gpu.graph_pools[pool]:
                raise RuntimeError("the graphs of this pool are all gone")
            self.gpu.graph_pools.setdefault(pool, WeakSet()).add(self)
        self.gpu.capturing = self
        self.states = [generator.get_state() for generator in self.generators]
        self.mode = Recorder(self.gpu, self.operations)
        self.mode.__enter__()

    def refuse(self, what: str) -> None:
        self.mode.invalidated = True
        raise RuntimeError(f"{REFUSAL}: {what}")

    def capture_end(self) -> None:
        self.mode.__exit__(None, None, None)
        self.gpu.capturing = None
        self.mode.undo()
        for generator, state in zip(self.generators, self.states, strict=True):
            generator.set_state(state)
        invalidated, self.mode = self.mode.invalidated, None  # copies of other memory are not needed any more
        if invalidated:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        assert self.gpu.capturing is None, "CUDA does not capture replays"
        self.replays += 1
        with plain_torch():
            for operation in self.operations:
                operation.run()


class Recorder(TorchDispatchMode):
    """Records operations, and knows how to undo what they changed."""

    def __init__(self, gpu: Any, operations: list[Operation]) -> None:
        super().__init__()
        self.gpu, self.operations = gpu, operations
        self.invalidated = False
        self.taken: dict[int, torch.UntypedStorage] = {}  # by address: memory taken within the capture
        self.before: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}  # other memory, and a copy of it

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with plain_torch():
            recorded = tree_map_only(Tensor, self._operand, (args, kwargs))
        generator = kwargs.get("generator")
        # By address, because torch makes a new Python object for the generator of an operation.
        if generator is not None and generator._cdata not in (g._cdata for g in self.gpu.capturing.generators):
            self.gpu.capturing.refuse("a generator that is not registered")
        with torch._C.DisableTorchFunction():  # the operation of a factory names the device that its result really has
            result = function(*args, **kwargs)
        with plain_torch():
            results = [self._result(tensor) for tensor in tensors_in(result)]
        self.operations.append(Operation(function, *recorded, results))
        return result

    def _operand(self, tensor: Tensor) -> Operand | Tensor:
        if tensor.dim() == 0 and self.gpu.device_of(tensor).type == "cpu":
            return tensor.clone()  # kernels take a number of the processor by value
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.taken and storage.data_ptr() not in self.before:
            self.before[storage.data_ptr()] = (StorageWeakRef(storage), storage.clone())
        return self._place(tensor)

    def _result(self, tensor: Tensor) -> Operand:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.before:
            self.taken[storage.data_ptr()] = storage
        return self._place(tensor)

    def _place(self, tensor: Tensor) -> Operand:
        address = tensor.untyped_storage().data_ptr()
        memory = self.taken[address] if address in self.taken else self.before[address][0]
        return Operand(memory, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def undo(self) -> None:
        """Restore other memory, and fill that of the graph with NaN, or with integers that are no index."""
        with plain_torch():
            for reference, copy in self.before.values():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if storage is not None:
                    storage.copy_(copy)
            for operation in self.operations:
                for place in operation.results:
                    if isinstance(place.memory, torch.UntypedStorage) and place.dtype is not torch.bool:
                        floats = place.dtype.is_floating_point
                        place.tensor().fill_(torch.nan if floats else torch.iinfo(place.dtype).min)
