"""What is loaded must be what is meant to be there: torch's own loaders convert, broadcast, and check sizes late."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

NEEDED: dict[type[Optimizer], tuple[str, ...]] = {Adam: ("step", "exp_avg", "exp_avg_sq")}
NEEDED[AdamW] = NEEDED[Adam]
"""What an optimizer that knows a parameter must know of it."""

LIKE_THE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def check_like(what: str, saved: Any, ours: Tensor) -> Tensor:
    """The saved tensor. Raises ValueError unless it is one of our shape and type."""
    if not isinstance(saved, Tensor):
        raise ValueError(f"{what} is a {type(saved).__name__}, not a tensor")
    if saved.shape != ours.shape or saved.dtype != ours.dtype:
        raise ValueError(
            f"{what} is {saved.dtype} {list(saved.shape)}, not {ours.dtype} {list(ours.shape)} as in this run"
        )
    return saved


def check_finite(what: str, tensor: Tensor) -> None:
    """Raises ValueError if a number is none."""
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ValueError(f"{what} holds numbers that are not finite")


def check_below(what: str, tensor: Tensor, choices: int) -> None:
    """Raises ValueError unless all of its whole numbers are from 0 to less than `choices`."""
    if tensor.numel() and not (tensor.min() >= 0 and tensor.max() < choices):
        raise ValueError(f"{what} is not one of {choices}")


def check_count(what: str, value: Any, most: int = 2**53) -> int:
    """The value. Raises ValueError unless it is a whole number from 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} is {value!r:.50}, not a whole number from 0 to {most}")
    return value


def check_numbers(what: str, values: Any, length: int | None = None, finite: bool = False) -> list[float]:
    """The values. Raises ValueError unless they are a list of (finite) numbers, of that length if one is given."""
    if not isinstance(values, list | tuple) or length not in (None, len(values)):
        raise ValueError(f"{what} is not a list of {length if length is not None else ''} numbers".replace("  ", " "))
    if any(type(value) not in (int, float) or (finite and not isfinite(value)) for value in values):
        raise ValueError(f"{what} holds something else than {'finite ' if finite else ''}numbers")
    return list(values)


def check_parts(what: str, value: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """The value. Raises ValueError unless it is a dict that has these parts."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is a {type(value).__name__}, not a dict")
    missing = [name for name in names if name not in value]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    return value


def load_module(module: nn.Module, saved: Any) -> None:
    """`module.load_state_dict(saved)`, but exactly: equal names, shapes and types. Raises ValueError otherwise."""
    ours = module.state_dict()
    saved = check_parts("the network's state", saved, ours)
    if len(saved) > len(ours):
        raise ValueError(f"the network's state has {len(saved)} parts, the network {len(ours)}")
    for name, tensor in ours.items():
        if isinstance(tensor, Tensor):  # a module's extra state is its own affair
            check_like(f"the network's {name}", saved[name], tensor)
    exactly = OrderedDict((name, saved[name]) for name in ours)
    exactly._metadata = ours._metadata  # versions of modules, ours and not a file's
    module.load_state_dict(exactly)


def load_optimizer(optimizer: Optimizer, saved: Any) -> None:
    """`optimizer.load_state_dict(saved)`, of which it may keep the tensors, but exactly. Raises ValueError otherwise.

    How steps are computed (fused, amsgrad, maximize …) stays as it is here: that is no state.
    """
    check_parts("the optimizer's state", saved, ("state", "param_groups"))
    check_parts("the optimizer's state", saved["state"], ())
    groups = saved["param_groups"]
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        raise ValueError(f"the optimizer has {len(optimizer.param_groups)} parameter groups, the saved one others")
    loaded = [_options(theirs, ours) for theirs, ours in zip(groups, optimizer.param_groups, strict=True)]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": loaded})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                _check_state(optimizer, group, parameter)


def _options(saved: Any, ours: dict[str, Any]) -> dict[str, Any]:
    """A saved parameter group with our settings where they are no numbers."""
    names = [name for name in ours if name != "initial_lr"]
    saved = dict(check_parts("a parameter group", saved, names))
    if not isinstance(saved["params"], list) or len(saved["params"]) != len(ours["params"]):
        raise ValueError(f"a saved parameter group does not hold {len(ours['params'])} parameters")
    for name, value in ours.items():
        if type(value) in (int, float):
            check_numbers(f"the optimizer's {name}", [saved.get(name, value)])
        elif isinstance(value, tuple):
            saved[name] = tuple(check_numbers(f"the optimizer's {name}", saved[name], len(value)))
        elif name != "params":
            saved[name] = value
    return saved


def _check_state(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    needed = NEEDED.get(type(optimizer), ()) + (("max_exp_avg_sq",) if group.get("amsgrad") else ())
    state = check_parts("the optimizer's state of a parameter", optimizer.state[parameter], needed)
    for name, value in state.items():
        if name in LIKE_THE_PARAMETER and value is not None:
            check_like(f"the optimizer's {name}", value, parameter)
        if name == "step" and not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)):
            raise ValueError("the optimizer's step is not a number")
