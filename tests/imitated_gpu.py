"""An imitated GPU: tensors stay in the processor's memory, and a tag on each storage names its imitated device.

The imitation counts faults, which a real GPU would refuse (an operation between devices, a generator of another device,
`numpy()` of a tensor on the GPU), and waits, in which the processor would wait for the GPU (a read, a boolean mask, an
index from the CPU, a copy from memory that is not pinned, the synchronisation of an event). A function mode answers
what Python asks of tensors (`device`, `to`, factories), and a dispatch mode sees every operation, those of backward
passes included. Memory, kernels, and races are not imitated; `FakeCuda` has the order of streams.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode

from tests.envs.executors import fake_cuda
from tests.envs.executors.fake_cuda import FakeCuda, tensors_in

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

READS = frozenset(
    f"aten::{name}"
    for name in [
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "equal",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "histc",
        "allclose",
    ]
)
"""Operations whose result the processor needs."""

CROSSING = frozenset(f"aten::{name}" for name in ("copy_", "_to_copy", "index", "index_put_", "set_"))
"""Operations that may have operands on two devices."""

DEVICE, IS_CUDA = Tensor.device.__get__, Tensor.is_cuda.__get__

RealGenerator, RealAutocast = torch.Generator, torch.autocast


def as_device(device: Any) -> torch.device:
    """Return a device with its index."""
    device = torch.device(device)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def real_device(tensor: Tensor) -> torch.device:
    """Return the device that holds a tensor's memory."""
    with torch._C.DisableTorchFunction():
        return tensor.device


class ImitatedGenerator(RealGenerator):
    """Generator of a device; the state of one on a GPU has 16 bytes, as on CUDA."""

    states: ClassVar[dict[bytes, Tensor]] = {}

    def __new__(cls, device: Any = "cpu") -> ImitatedGenerator:
        self = RealGenerator.__new__(cls, "cpu")
        self.place = as_device(device)
        return self

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:
        return self.place

    def __deepcopy__(self, memo: dict[int, Any]) -> ImitatedGenerator:
        return ImitatedGenerator(self.place).set_state(self.get_state())

    def get_state(self) -> Tensor:
        state = super().get_state()
        if self.place.type == "cpu":
            return state
        key = hashlib.md5(bytes(state.tolist())).digest()
        self.states[key] = state
        return torch.tensor(list(key), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> ImitatedGenerator:
        super().set_state(state if self.place.type == "cpu" else self.states[bytes(state.tolist())])
        return self


class ImitatedAutocast(RealAutocast):
    """Autocast of a GPU, applied to the processor, so that data types are those of the precision."""

    def __init__(self, device_type: str, *args: Any, **settings: Any) -> None:
        super().__init__({"cuda": "cpu"}.get(device_type, device_type), *args, **settings)


class ImitatedGpu:
    """GPUs that are not there.

    Use: `with ImitatedGpu() as gpu:`; then build everything on `GPU`.

    Args:
        count: Number of GPUs.

    Attributes:
        faults: What a real GPU would refuse, with the place in the program, and how often.
        waits: Where the processor would wait for the GPU, and how often.
    """

    tags: ClassVar[dict[int, tuple[StorageWeakRef, torch.device]]] = {}  # of all imitations: the program has caches
    pinned: ClassVar[dict[int, StorageWeakRef]] = {}

    def __init__(self, count: int = 1) -> None:
        self.patch, self.count = pytest.MonkeyPatch(), count
        self.faults: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.quiet = 0
        self.backward_passes = 0
        self.last = GPU  # device of the latest operation on a GPU

    def device_of(self, tensor: Tensor) -> torch.device:
        if (device := real_device(tensor)).type == "meta":
            return device
        found = self.tags.get(tensor.untyped_storage()._cdata)
        return CPU if found is None or found[0].expired() else found[1]

    def place(self, tensor: Tensor, device: torch.device) -> None:
        """Tag a tensor's storage."""
        if real_device(tensor).type == "meta":
            return
        storage = tensor.untyped_storage()
        if device.type == "cuda":
            self.tags[storage._cdata] = (StorageWeakRef(storage), device)
        else:
            self.tags.pop(storage._cdata, None)

    def is_pinned(self, tensor: Tensor) -> bool:
        found = self.pinned.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
        self.place(tensor, CPU)
        return tensor

    def note(self, found: Counter[str], what: str) -> None:
        """Count a fault or a wait, with the innermost places of the program."""
        if self.quiet:
            return
        places, frame = [], sys._getframe(1)
        while frame is not None and len(places) < 3:
            path = frame.f_code.co_filename
            if "esper_lightning/" in path or "/callbacks/" in path:
                places.append(f"{path.rpartition('esper_lightning/')[2]}:{frame.f_lineno}")
            frame = frame.f_back
        found[" < ".join([what, *places])] += 1

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Do not look at what happens within the context."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def __enter__(self) -> ImitatedGpu:
        patch = self.patch
        self.cuda = FakeCuda(patch)
        patch.setattr(fake_cuda.Event, "synchronize", lambda event: self.note(self.waits, "event"))
        patch.setattr(torch, "Generator", ImitatedGenerator)
        patch.setattr(torch, "autocast", ImitatedAutocast)
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.nn.RNNBase, "flatten_parameters", lambda layer: None)
        properties = SimpleNamespace(total_memory=2**40, name="imitated")
        answers = {
            "get_device_name": "imitated",
            "current_device": 0,
            "device_count": self.count,
            "get_device_properties": properties,
            "get_device_capability": (8, 0),
            "get_rng_state": torch.zeros(16, dtype=torch.uint8),
            "get_rng_state_all": [torch.zeros(16, dtype=torch.uint8) for _ in range(self.count)],
            "set_rng_state": None,
            "set_rng_state_all": None,
            "manual_seed_all": None,
            "synchronize": None,
            "memory_allocated": 0,
            "max_memory_allocated": 0,
            "reset_peak_memory_stats": None,
        }
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
        for check in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):
            patch.setattr(torch.optim.Optimizer, check, lambda optimizer: None, raising=False)  # asks the driver
        for module in ("torch.optim.optimizer", "torch.nn.utils.clip_grad"):
            patch.setattr(sys.modules[module], "_group_tensors_by_device_and_dtype", self._group)
        self.functions, run = Functions(self), sys.modules["torch.autograd"]._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self.backward_passes += 1
            try:
                with self.functions:  # torch suspends it, and backward passes may call Python's functions
                    return run(*args, **kwargs)
            finally:
                self.backward_passes -= 1

        patch.setattr(sys.modules["torch.autograd"], "_engine_run_backward", run_backward)
        self.modes: list[AbstractContextManager[Any]] = [Operations(self), self.functions]
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*error)
        self.patch.undo()

    def _group(self, lists: Sequence[Sequence[Any]], with_indices: bool = False) -> dict[Any, Any]:
        """Group tensors as torch does in C++, where it would see the devices that they really have."""
        groups: dict[Any, Any] = {}
        for i, first in enumerate(lists[0]):
            key = self.device_of(first), first.dtype
            parts, indices = groups.setdefault(key, ([[] for _ in lists], []))
            for part, tensors in zip(parts, lists, strict=True):
                if tensors:
                    part.append(tensors[i])
            indices.append(i)
        return groups


class Operations(TorchDispatchMode):
    """Sees every operation, and tags its results."""

    def __init__(self, gpu: ImitatedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        gpu, kwargs, name = self.gpu, kwargs or {}, function._schema.name
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        devices = [gpu.device_of(tensor) for tensor in inputs]
        gpus = {device for device in devices if device.type == "cuda"}
        if gpus and not gpu.quiet:
            on_cpu = [
                t for t, d in zip(inputs, devices, strict=True) if d.type == "cpu" and t.dim() > 0 and t.numel() > 0
            ]
            if name not in CROSSING and (on_cpu or len(gpus) > 1):
                gpu.note(gpu.faults, f"{name} between devices")
            self._find_waits(name, args, kwargs)
        result = function(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in inputs if real_device(tensor).type != "meta"}
        # A backward pass in C++ makes zeros on the device that tensors really have.
        home = next(iter(gpus), gpu.last if gpu.backward_passes and not inputs else CPU)
        if gpus:
            gpu.last = home
        if home.type == "cuda":
            for tensor in tensors_in(result):
                if real_device(tensor).type != "meta" and tensor.untyped_storage()._cdata not in known:
                    gpu.place(tensor, home)
        return result

    def _find_waits(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gpu = self.gpu
        # The sum of repeats on the GPU is the length of the result, unless that is given.
        repeats = name == "aten::repeat_interleave" and isinstance(args[:2][-1], Tensor)
        if name in READS or (repeats and kwargs.get("output_size") is None):
            gpu.note(gpu.waits, name)
        if name in ("aten::index", "aten::index_put_"):
            for index in args[1]:
                if index is not None and index.dtype is torch.bool:
                    gpu.note(gpu.waits, f"{name} with a mask")
                elif index is not None and gpu.device_of(index).type == "cpu":
                    gpu.note(gpu.waits, f"{name} with an index from the CPU")
        if name == "aten::copy_":
            self._find_wait_of_copy(
                args[0], args[1], non_blocking=bool(kwargs.get("non_blocking", args[2:] == (True,)))
            )

    def _find_wait_of_copy(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        gpu = self.gpu
        devices = gpu.device_of(target).type, gpu.device_of(source).type
        if set(devices) != {"cpu", "cuda"}:
            return
        to_cpu = devices[0] == "cpu"
        pinned = gpu.is_pinned(target if to_cpu else source)
        if not pinned or (to_cpu and not non_blocking):
            gpu.note(gpu.waits, f"copy {'from' if to_cpu else 'to'} the GPU, {'' if pinned else 'not '}pinned")


class Functions(TorchFunctionMode):
    """Answers what Python asks of tensors."""

    def __init__(self, gpu: ImitatedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        gpu, kwargs, name = self.gpu, dict(kwargs or {}), getattr(function, "__name__", "")
        if function == DEVICE:
            return gpu.device_of(args[0])
        if function == IS_CUDA:
            return gpu.device_of(args[0]).type == "cuda"
        if name == "record_stream":
            return None
        if name == "pin_memory":
            return gpu.pin(args[0].clone())
        if name in ("to", "cpu", "cuda"):
            return self._move(name, function, args, kwargs)
        if name == "__deepcopy__":
            with gpu.silence():  # it copies within the device, from one storage to another
                result = function(*args, **kwargs)
            gpu.place(result, gpu.device_of(args[0]))
            return result
        if name in ("tolist", "numpy", "__array__") and gpu.device_of(args[0]).type == "cuda":
            found = gpu.waits if name == "tolist" else gpu.faults
            gpu.note(found, f"{name}() of a tensor on the GPU")
        return self._create(function, name, args, kwargs)

    def _create(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and tag what a factory makes."""
        gpu = self.gpu
        is_factory = function in _device._device_constructors()
        wanted = kwargs.get("device")
        if wanted is None and name == "new_tensor":
            wanted = gpu.device_of(args[0])
        if wanted is None and is_factory and _device.CURRENT_DEVICE is not None:
            wanted = _device.CURRENT_DEVICE
        target = None if wanted is None else as_device(wanted)
        if target is not None and target.type == "cuda":
            kwargs["device"] = CPU
        elif target is not None:
            kwargs["device"] = target
        pinned = bool(kwargs.pop("pin_memory", False))
        self._check_generator(name, args, kwargs, target)
        if target is not None and target.type == "cuda" and name in ("tensor", "as_tensor", "new_tensor"):
            gpu.note(gpu.waits, f"{name} on the GPU from Python numbers")
        result = function(*args, **kwargs)
        if target is None and is_factory:
            target = CPU
        if target is not None:
            for tensor in tensors_in(result):
                gpu.place(tensor, target)
        if pinned:
            gpu.pin(result)
        return result

    def _check_generator(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.device | None
    ) -> None:
        generator = kwargs.get("generator")
        if generator is None:
            return
        first = next(tensors_in([*args[:1], kwargs.get("input"), kwargs.get("tensor")]), None)
        home = target or (CPU if first is None else self.gpu.device_of(first))
        if home.type != "meta" and home != generator.device:
            self.gpu.note(self.gpu.faults, f"{name} on {home} with a generator on {generator.device}")

    def _move(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copy a tensor to another device: `to`, `cpu` and `cuda`."""
        gpu, tensor, rest = self.gpu, args[0], list(args[1:])
        goal = {"cpu": CPU, "cuda": GPU}.get(name)
        dtype = kwargs.pop("dtype", None)
        if kwargs.get("device") is not None:
            goal = as_device(kwargs["device"])
        kwargs.pop("device", None)
        positional = []
        for value in rest:
            if isinstance(value, torch.device | str):
                goal = as_device(value)
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, Tensor):
                goal, dtype = gpu.device_of(value), value.dtype
            elif value is not None:
                positional.append(value)
        kwargs.pop("non_blocking", None)  # from memory that is not pinned, such a copy waits all the same
        copy = bool(kwargs.pop("copy", positional[1:2] == [True]))
        here = gpu.device_of(tensor)
        goal = goal or here
        if "meta" in (goal.type, here.type):
            return Tensor.to(tensor, device="meta" if goal.type == "meta" else CPU, dtype=dtype, copy=copy, **kwargs)
        if goal == here:
            return Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=copy, **kwargs)
        if here.type == "cpu" and not gpu.is_pinned(tensor):
            gpu.note(gpu.waits, "to the GPU, not pinned")
        if goal.type == "cpu":
            gpu.note(gpu.waits, "to the CPU")
        with gpu.silence():
            result = Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=True, **kwargs)
        gpu.place(result, goal)
        return result
