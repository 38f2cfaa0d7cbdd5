<<<<<<< HEAD
"""Settings and states from files, where another run or another machine has written them."""

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from textwrap import shorten
=======
"""Strict checks of loaded state: torch's own loaders convert dtypes, broadcast, and check sizes late."""

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
>>>>>>> main
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

Settings = TypeVar("Settings")

GENERATOR_STATE_BYTES = {5056: "cpu", 16: "cuda"}
"""Type of device by the size of its generators' states in torch."""


<<<<<<< HEAD
def excerpt(value: Any, length: int = 200) -> str:
    """Return the beginning of a value's text, for an error message."""
    return shorten(str(value), length, placeholder=" …")
=======
def check_matching_tensor(label: str, saved: Any, expected: Tensor) -> Tensor:
    """Return the saved tensor. Raises ValueError unless it has the shape and dtype of `expected`."""
    if not isinstance(saved, Tensor):
        raise ValueError(f"{label} is a {type(saved).__name__}, not a tensor")
    if saved.shape != expected.shape or saved.dtype != expected.dtype:
        raise ValueError(
            f"{label} is {saved.dtype} {list(saved.shape)}, not {expected.dtype} {list(expected.shape)} as in this run"
        )
    return saved
>>>>>>> main


def generator_device(state: Any) -> str | None:
    """Return the type of device of the generator that a saved state is of; None if it is of none."""
    return GENERATOR_STATE_BYTES.get(state.numel()) if isinstance(state, Tensor) else None


def check_generator_state(label: str, saved: Tensor, generator: torch.Generator) -> Tensor:
    """Return the saved state of a generator. Raises ValueError if it is of another type of device."""
    if generator_device(saved) not in (None, generator.device.type):
        raise ValueError(f"{label} is of a generator on {generator_device(saved)}, not on {generator.device.type}")
    # A clone, because torch reads the storage of a state from its start, which is wrong for a view.
    return saved.cpu().clone()


<<<<<<< HEAD
def check_keys(label: str, value: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError if a mapping lacks one of these keys."""
    if missing := [name for name in names if name not in value]:
=======
def check_finite(label: str, tensor: Tensor) -> None:
    """Raise ValueError if a floating-point tensor contains NaN or infinity."""
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ValueError(f"{label} holds numbers that are not finite")


def check_keys(label: str, value: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """Return the value. Raises ValueError unless it is a mapping with all these keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{label} is a {type(value).__name__}, not a dict")
    missing = [name for name in names if name not in value]
    if missing:
>>>>>>> main
        raise ValueError(f"{label} lacks {', '.join(missing)}")


def load_settings(kind: type[Settings], saved: Any) -> Settings:
    """Return settings, a dataclass of type `kind`, given these or the plain data that `asdict` has made of them.

    Names that the data lack have their defaults. Raises ValueError if they name a setting that does not exist, or if a
    value is out of range.
    """
    if isinstance(saved, kind):
        return saved
    types, values = get_type_hints(kind), dict(saved)
    for name, value in values.items():
        hint = types.get(name)
        nested: Any = next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None)
        if nested is not None and isinstance(value, Mapping):
            values[name] = load_settings(nested, value)
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"the settings {kind.__name__} do not fit: {error}") from error
<<<<<<< HEAD
=======


def excerpt(value: Any, length: int = 200) -> str:
    """Return the text of a value, cut to `length` characters, for an error message."""
    text = str(value)
    return text if len(text) <= length else f"{text[: length - 1]}…"
>>>>>>> main
