"""Seeded mutations of nested settings, manifests, checkpoints and bytes."""

import copy
import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

NUMBERS: tuple[Any, ...] = (
    -1,
    0,
    1,
    3,
    0.5,
    -0.5,
    1e-30,
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    10**30,
    -(10**30),
    2**63,
)
"""Numbers that cost no real work: the huge ones exceed any machine."""

OTHERS: tuple[Any, ...] = (
    *(None, True, False, "", "x", "NaN", "1e400", "ünïcödé 🌱", "a" * 5000, "../../x", "null", "{", "[1", "!!python/x"),
    *(
        [],
        {},
        [[]],
        [None],
        {"": 0},
        [1, "a"],
        {"class_path": "os.system", "init_args": {"command": "true"}},
        "os.system",
    ),
)

Path = tuple[Any, ...]


def paths(value: Any, where: Path = ()) -> list[Path]:
    """Return the path to every key of a dict and item of a list or tuple, at any depth."""
    found: list[Path] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list | tuple) and len(value) <= 100:
        children = list(enumerate(value))
    else:
        return found
    for key, child in children:
        found += [(*where, key), *paths(child, (*where, key))]
    return found


def at(value: Any, where: Path) -> Any:
    for key in where:
        value = value[key]
    return value


def changed(value: Any, where: Path, change: Callable[[Any, Any], None]) -> Any:
    """Return `value` after `change(container, key)` at a path; containers on the way are copied, tuples as lists."""
    copied = list(value) if isinstance(value, list | tuple) else copy.copy(value)
    if len(where) == 1:
        change(copied, where[0])
    else:
        copied[where[0]] = changed(copied[where[0]], where[1:], change)
    return tuple(copied) if isinstance(value, tuple) else copied


def alternatives(old: Any) -> list[Any]:
    """Return another number of the same type, so that it passes checks of types."""
    return [number for number in NUMBERS if type(number) is type(old)] or list(NUMBERS)


def mutate(value: Any, random: Random, tensors: bool = False) -> tuple[str, Any]:
    """Make one change somewhere in `value`; return the result and a description."""
    candidates = paths(value)
    # Depth is drawn first: most paths lead deep into lists of like items, and upper levels matter as much.
    depth = random.choice(sorted({len(where) for where in candidates}))
    where = random.choice([place for place in candidates if len(place) == depth])
    old = at(value, where)
    if isinstance(old, Tensor) and tensors and random.random() < 0.8:
        name, new = mutate_tensor(old, random)
        return f"{where}: {name}", changed(value, where, lambda box, key: box.__setitem__(key, new))
    kinds: dict[str, Callable[[Any, Any], None]] = {
        "drop": lambda box, key: box.pop(key),
        "number": lambda box, key: box.__setitem__(key, random.choice(alternatives(old))),
        "other": lambda box, key: box.__setitem__(key, copy.deepcopy(random.choice(OTHERS))),
        "wrap": lambda box, key: box.__setitem__(key, [box[key]]),
        "double": lambda box, key: (
            box.insert(key, box[key]) if isinstance(box, list) else box.__setitem__(f"{key}2", box[key])
        ),
        "swap": lambda box, key: box.__setitem__(key, at(value, random.choice(candidates))),
        "rename": lambda box, key: box.__setitem__(f"{key}x" if isinstance(box, dict) else key, box.pop(key)),
    }
    if isinstance(old, int | float) and not isinstance(old, bool):
        kinds["same type"] = kinds["same type too"] = kinds["number"]
        kinds["nudge"] = lambda box, key: box.__setitem__(key, box[key] + random.choice([-1, 1, 0.5]))
    kind = random.choice(list(kinds))

    def change(box: Any, key: Any) -> None:
        if not isinstance(box, dict | list):
            raise TypeError
        kinds[kind](box, key)

    try:
        return f"{where}: {kind}", changed(value, where, change)
    except (TypeError, IndexError):  # not possible at this path
        return mutate(value, random, tensors)


def mutate_tensor(tensor: Tensor, random: Random) -> tuple[str, Tensor]:
    """Return a changed tensor and a description."""
    flat = tensor.clone().flatten()
    kinds: dict[str, Callable[[], Tensor]] = {
        "one less": lambda: tensor[:-1].clone() if tensor.dim() else tensor.new_zeros(2),
        "one more": lambda: torch.cat([tensor, tensor]) if tensor.dim() else tensor.new_zeros(1),
        "flat": lambda: flat,
        "empty": lambda: tensor.new_zeros(0),
        "one row": lambda: tensor[:1].clone() if tensor.dim() else tensor.new_zeros(1, 1),
        "double": lambda: tensor.to(torch.float64 if tensor.dtype != torch.float64 else torch.float32),
        "integers": lambda: tensor.to(torch.int32),
        "complex": lambda: tensor.to(torch.complex64),
        "minus one": lambda: torch.full_like(tensor, -1) if tensor.dtype != torch.bool else ~tensor,
        "large": lambda: torch.full_like(tensor, 100),
        "expanded": lambda: tensor.new_zeros(()).expand(10**12),
    }
    if tensor.is_floating_point():
        kinds["nan"] = lambda: torch.full_like(tensor, math.nan)
        kinds["inf"] = lambda: torch.full_like(tensor, math.inf)
    name = random.choice(list(kinds))
    return name, kinds[name]()


def mutate_bytes(whole: bytes, random: Random) -> tuple[str, bytes]:
    """Damage a file once and return a description."""
    place = random.randrange(len(whole))
    length = random.choice([1, 1, 4, 64, 4096])
    match random.choice(["flip", "cut", "drop", "insert", "zero", "repeat", "random"]):
        case "flip":
            return f"flip at {place}", whole[:place] + bytes([whole[place] ^ 1 << random.randrange(8)]) + whole[
                place + 1 :
            ]
        case "cut":
            return f"cut at {place}", whole[:place]
        case "drop":
            return f"drop {length} at {place}", whole[:place] + whole[place + length :]
        case "insert":
            return f"insert {length} at {place}", whole[:place] + random.randbytes(length) + whole[place:]
        case "zero":
            return f"zero {length} at {place}", whole[:place] + bytes(length) + whole[place + length :]
        case "repeat":
            return f"repeat {length} at {place}", whole[: place + length] + whole[place:]
        case _:
            return f"random {length} at {place}", whole[:place] + random.randbytes(length) + whole[place + length :]


def mutate_number(row: Tensor, random: Random) -> tuple[str, Tensor]:
    """Return a description and a copy of a row of whole numbers in which one of them is another."""
    copied, place = row.clone(), random.randrange(len(row))
    copied[place] = random.choice([-1, 0, 1, 3, 2**40, int(row[place]) + 1])
    return f"{place}: number", copied
