"""Settings and states from files, where another run or another machine has written them."""

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from textwrap import shorten
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

Settings = TypeVar("Settings")

GENERATOR_STATE_BYTES = {5056: "cpu", 16: "cuda"}
"""Type of device by the size of its generators' states in torch."""


def excerpt(value: Any, length: int = 200) -> str:
    """Return the beginning of a value's text, for an error message."""
    return shorten(str(value), length, placeholder=" …")


def generator_device(state: Any) -> str | None:
    """Return the type of device of the generator that a saved state is of; None if it is of none."""
    return GENERATOR_STATE_BYTES.get(state.numel()) if isinstance(state, Tensor) else None


def check_generator_state(label: str, saved: Tensor, generator: torch.Generator) -> Tensor:
    """Return the saved state of a generator. Raises ValueError if it is of another type of device."""
    if generator_device(saved) not in (None, generator.device.type):
        raise ValueError(f"{label} is of a generator on {generator_device(saved)}, not on {generator.device.type}")
    # A clone, because torch reads the storage of a state from its start, which is wrong for a view.
    return saved.cpu().clone()


def check_keys(label: str, value: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError if a mapping lacks one of these keys."""
    if missing := [name for name in names if name not in value]:
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
