"""Access to tensors in nested tuples, lists and mappings."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

Path = tuple[int | str, ...]
"""Indices and keys that select a part of a nested value; an empty path selects the value itself."""


def _parts(value: Any) -> list[tuple[int | str, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, tuple | list) else []


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in `value`, depth first."""
    if isinstance(value, Tensor):
        yield value
    for _, part in _parts(value):
        yield from tensors(part)


def first_tensor(value: Any) -> Path | None:
    """Return the path to the first floating-point tensor, depth first; None if there is none."""
    if isinstance(value, Tensor):
        return () if value.is_floating_point() else None
    for key, part in _parts(value):
        path = first_tensor(part)
        if path is not None:
            return (key, *path)
    return None


def resolve(value: Any, keys: list[str]) -> Path:
    """Return the path for keys given as text: each is a key of a mapping if it has that key, otherwise an index.

    Raises LookupError if a key does not exist; elements of a tensor cannot be selected.
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
    """Return the part of `value` at `path`."""
    for key in path:
        value = value[key]
    return value


def put(value: Any, path: Path, part: Any) -> Any:
    """Return `value` with the part at `path` replaced; containers along the path are copied, all else is shared."""
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
    """Return `value` with `change` applied to every tensor; the containers are copied."""
    if isinstance(value, Tensor):
        return change(value)
    for key, part in _parts(value):
        value = put(value, (key,), map_tensors(part, change))
    return value
