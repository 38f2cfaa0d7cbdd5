"""Entry of one slot in a manifest: the content of the slot in plain JSON types, and its checks."""

import reprlib
from collections.abc import Callable
from typing import Any, get_args

from esper_lightning.growth.alpha import Ramp, check_ramp
from esper_lightning.growth.blend import BlendStyle
from esper_lightning.growth.stages import OCCUPIED, Stage

MAX_TICKS = 2**53
"""Largest number of ticks, exact in floating point."""


def _is_tick_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TICKS


ENTRY_CHECKS: dict[str, Callable[[Any], bool]] = {
    "stage": lambda value: isinstance(value, str) and value in Stage.__members__,
    "blueprint": lambda value: value is None or isinstance(value, str),
    "style": lambda value: value in get_args(BlendStyle),
    "ramp": lambda value: (
        isinstance(value, list)
        and len(value) == len(Ramp._fields)
        and all(type(number) in (int, float) for number in value[:2])
        and _is_tick_count(value[2])
        and isinstance(value[3], str)
    ),
    "ramp_ticks": _is_tick_count,
    "age": _is_tick_count,
    "ticks_in_stage": _is_tick_count,
    "folded": lambda value: value is None or (type(value) is int and value in (1, 3)),
}
"""Checks of type and range for the values of an entry; name, layout and width are compared with the slot instead."""


def check_entry(entry: Any, *, slot: str, layout: str, width: int) -> Ramp:
    """Return the ramp of a slot's entry. Raises ValueError unless every value is valid and fits the slot."""
    try:
        if not isinstance(entry, dict):
            raise ValueError(f"it is a {type(entry).__name__}, no dict")
        for name, is_valid in ENTRY_CHECKS.items():
            if name not in entry or not is_valid(entry[name]):
                raise ValueError(f"{name} is {reprlib.repr(entry.get(name, 'missing'))}")
        for name, expected in (("slot", slot), ("layout", layout), ("width", width)):
            if type(entry.get(name)) is not type(expected) or entry[name] != expected:
                raise ValueError(
                    f"{name} is {reprlib.repr(entry.get(name, 'missing'))}, the slot's is {reprlib.repr(expected)}"
                )
        if (Stage[entry["stage"]] in OCCUPIED) != (entry["blueprint"] is not None):
            raise ValueError(f"stage {entry['stage']} with blueprint {reprlib.repr(entry['blueprint'])}")
        if entry["folded"] is not None and layout != "image":
            raise ValueError(f"folded is {entry['folded']!r}, which only image features can have")
        return check_ramp(Ramp(*entry["ramp"]))
    except ValueError as error:
        raise damaged_entry(slot, error) from None


def damaged_entry(slot: str, error: ValueError) -> ValueError:
    return ValueError(f"slot {slot!r}: the manifest's entry is damaged or of another version: {error}")
