"""Tensors in nested tuples, lists and mappings; networks that take such inputs: calls, mode, buffers and copies."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

KeyPath = tuple[int | str, ...]
"""Indices and keys that select a part of a nested value; an empty path selects the value itself."""

ExampleInput = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""Input of a network: one tensor, a tuple of positional arguments, or a mapping of keyword arguments."""

COPY_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError)
"""Exceptions of `deepcopy` for an object that cannot be copied, such as a lock or an open file."""

BATCH_LENGTH_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, AttributeError)
"""Exceptions that a network may raise if the batch has an unexpected length."""

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def _children(value: Any) -> list[tuple[int | str, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, tuple | list) else []


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in `value`, depth first."""
    if isinstance(value, Tensor):
        yield value
    for _, part in _children(value):
        yield from iter_tensors(part)


def first_tensor_path(value: Any) -> KeyPath | None:
    """Return the path to the first floating-point tensor, depth first; None if there is none."""
    if isinstance(value, Tensor):
        return () if value.is_floating_point() else None
    for key, part in _children(value):
        path = first_tensor_path(part)
        if path is not None:
            return (key, *path)
    return None


def get_at(value: Any, path: KeyPath) -> Any:
    for key in path:
        value = value[key]
    return value


def replace_at(value: Any, path: KeyPath, part: Any) -> Any:
    """Return `value` with the part at `path` replaced; containers along the path are copied, all else is shared."""
    if not path:
        return part
    key, *rest = path
    new = replace_at(value[key], tuple(rest), part)
    if isinstance(value, tuple):
        return _tuple_like(value, [new if i == key else old for i, old in enumerate(value)])
    copied = copy.copy(value)
    copied[key] = new
    return copied


def _tuple_like(value: tuple[Any, ...], parts: list[Any]) -> Any:
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return `value` with `change` applied to every tensor; the containers are copied."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return _tuple_like(value, [map_tensors(part, change) for part in value])
    for key, part in _children(value):
        value = replace_at(value, (key,), map_tensors(part, change))
    return value


def call_network(network: nn.Module, example: ExampleInput) -> Any:
    """Return the network's output for `example`."""
    if isinstance(example, Mapping):
        return network(**example)
    return network(*example) if isinstance(example, tuple) else network(example)


def batch_size(example: Any) -> int:
    """Return the number of rows of the first tensor in an example."""
    return len(next(iter_tensors(example)))


def repeat_rows(example: Any, rows: int, times: int) -> Any:
    """Return `example` with every tensor of `rows` rows repeated `times` times; others (a mask, say) are unchanged."""
    return map_tensors(example, lambda x: x.repeat(times, *[1] * (x.ndim - 1)) if x.ndim and len(x) == rows else x)


def is_equal_up_to_rounding(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding that depends on the batch size."""
    if one.shape != other.shape or not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    precision = max(1e-3, 4 * torch.finfo(one.dtype).eps)
    scale = other.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return torch.allclose(one, other, rtol=precision, atol=max(1e-5, precision * scale), equal_nan=True)


def max_difference(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest absolute difference of two lists of tensors; infinity if shapes differ, or for NaN."""
    if [output.shape for output in outputs] != [output.shape for output in expected]:
        return float("inf")
    pairs = [(a.double(), b.double()) for a, b in zip(outputs, expected, strict=True) if a.numel()]
    infinity = float("inf")
    return max((float((a - b).abs().nan_to_num(infinity, infinity).max()) for a, b in pairs), default=0.0)


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Set evaluation mode within a `with` block; then restore each module's mode, new modules taking the network's."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module in network.modules():
            module.training = modes.get(module, modes[network])


@contextmanager
def preserved_buffers(network: nn.Module) -> Iterator[None]:
    """Discard writes to the network's buffers within this context."""
    buffers = [(module, name, x) for module in network.modules() for name, x in module.named_buffers(recurse=False)]
    # Copies replace the buffers. With track_running_stats = False instead, BatchNorm would save fewer tensors, which
    # torch refuses in a recomputed pass.
    for module, name, buffer in buffers:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)


def copy_module(module: AnyModule, memo: Mapping[int, Any] | None = None) -> AnyModule:
    """Return a deep copy of a module, in which objects that `memo` names by their id are those of `memo`.

    Tensors that a forward pass has computed are copied without their graph. Raises ValueError if a part of the module
    cannot be copied.
    """
    try:
        return copy.deepcopy(module, computed_tensors(module) | dict(memo or {}))
    except COPY_ERRORS as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{type(module).__name__} cannot be copied: {reason:.200}") from error


def computed_tensors(module: nn.Module) -> dict[int, Any]:
    """Return copies, by the originals' id, of tensors in a module that a forward pass has computed.

    They are stored activations, or the weight of `torch.nn.utils.weight_norm`, which `deepcopy` refuses.
    """
    tensors = (tensor for part in module.modules() for tensor in iter_tensors(vars(part)))
    return {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}


def hooks_of(module: nn.Module) -> list[Any]:
    """Return all hooks that are registered on a module itself."""
    tables = (value for name, value in vars(module).items() if name.endswith("_hooks") and isinstance(value, dict))
    return [hook for table in tables for hook in table.values()]
