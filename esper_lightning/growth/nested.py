"""Tensors within nested values: tuples, lists and mappings of tensors."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

Path = tuple[int | str, ...]
"""Indices and keys that lead from a value to one of its parts; empty: the value itself."""


def _parts(value: Any) -> list[tuple[int | str, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, tuple | list) else []


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, depth first."""
    if isinstance(value, Tensor):
        yield value
    for _, part in _parts(value):
        yield from tensors(part)


def first_tensor(value: Any) -> Path | None:
    """Where the first floating-point tensor is, depth first; None if there is none."""
    if isinstance(value, Tensor):
        return () if value.is_floating_point() else None
    for key, part in _parts(value):
        path = first_tensor(part)
        if path is not None:
            return (key, *path)
    return None


def resolve(value: Any, keys: list[str]) -> Path:
    """The path that written keys mean: in a mapping the key as it is, or else the index of that number.

    Raises LookupError if they lead nowhere; the numbers within a tensor are no parts.
    """
    if not keys:
        return ()
    key: int | str = keys[0]
    if not (isinstance(value, Mapping) and key in value):
        if isinstance(value, Tensor) or not keys[0].lstrip("-").isdigit():
            raise LookupError(key)
        key = int(key)
    try:
        part = value[key]
    except TypeError:
        raise LookupError(key) from None
    return (key, *resolve(part, keys[1:]))


def pick(value: Any, path: Path) -> Any:
    """The part of `value` that `path` leads to."""
    for key in path:
        value = value[key]
    return value


def put(value: Any, path: Path, part: Any) -> Any:
    """`value` with another part at `path`; containers on the way are copied, everything else is shared."""
    if not path:
        return part
    key, *rest = path
    inner = put(value[key], tuple(rest), part)
    if isinstance(value, tuple):
        parts = list(value)
        parts[key] = inner
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    changed = copy.copy(value)
    changed[key] = inner
    return changed


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor changed; the containers are copied."""
    if isinstance(value, Tensor):
        return change(value)
    for key, part in _parts(value):
        value = put(value, (key,), map_tensors(part, change))
    return value
