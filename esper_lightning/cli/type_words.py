"""Types of settings in words."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    Any: "any value",
}


LISTS = (list, set, tuple, Sequence, Iterable)


def type_words(hint: Any) -> str:
    """Return a type in words, such as `an integer or null`."""
    members = list(union_members(hint))
    listed = tuple(dict.fromkeys(value for one in members if get_origin(one) is Literal for value in get_args(one)))
    if listed:  # several lists of values are one
        first = next(number for number, one in enumerate(members) if get_origin(one) is Literal)
        members = [one for one in members if get_origin(one) is not Literal]
        members.insert(min(first, len(members)), Literal[listed])
    return " or ".join(dict.fromkeys(_words(member) for member in members))


def union_members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, at any depth and null last, or the type itself."""
    if get_origin(hint) in (Union, UnionType):
        for member in sorted(get_args(hint), key=lambda one: one is NoneType):
            yield from union_members(member)
    else:
        yield hint


def choices_of(hint: Any) -> list[str]:
    """Return the values that a type allows, if it lists them."""
    values: list[str] = []
    for member in union_members(hint):
        if get_origin(member) is Literal:
            values += map(str, get_args(member))
        elif member is bool:
            values += ["true", "false"]
        elif isinstance(member, type) and issubclass(member, Enum):
            values += list(member.__members__)
    return list(dict.fromkeys(values))


def is_open(hint: Any) -> bool:
    """Return True if a value of this type has parts that only its class, or the user, names."""
    for member in union_members(hint):
        origin = get_origin(member) or member
        is_settings = isinstance(origin, type) and dataclasses.is_dataclass(origin)
        is_plain = origin in WORDS or origin is Literal or (isinstance(origin, type) and _is_plain(origin))
        if origin in LISTS and not any(is_open(part) for part in get_args(member) if part is not Ellipsis):
            continue
        if not (is_settings or is_plain) or origin is Any:
            return True
    return False


def _is_plain(kind: type) -> bool:
    return issubclass(kind, int | float | str | Enum | PurePath)


def _words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in WORDS:
        return WORDS[hint]
    if origin is Literal:
        values = list(dict.fromkeys(map(str, arguments)))
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    if origin in LISTS:
        inside = [argument for argument in arguments if argument is not Ellipsis]
        return f"a list ({type_words(inside[0])} each)" if len(inside) == 1 else "a list"
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        return f"a mapping (name: {type_words(arguments[1])})" if arguments else "a mapping"
    if origin is Callable or hint is Callable:
        return "a class or function"
    if isinstance(hint, type):
        if dataclasses.is_dataclass(hint):
            return f"settings ({', '.join(field.name for field in dataclasses.fields(hint))})"
        if issubclass(hint, Enum):
            return f"one of {', '.join(hint.__members__)}"
        for kind in (bool, int, float):
            if issubclass(hint, kind):  # a number with a bound
                return f"{WORDS[kind]} ({_spaced(hint.__name__)})"
        if issubclass(hint, str | PurePath):
            return "a path" if "path" in hint.__name__.lower() else "text"
        return f"a class ({hint.__name__})"
    return "a value"


def _spaced(name: str) -> str:
    """Return `positive int` for `PositiveInt`."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()
