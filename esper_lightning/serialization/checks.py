"""Strict checks for `load_state_dict`: torch's own loaders convert dtypes, broadcast, and check sizes late."""

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from math import isfinite
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from esper_lightning.serialization.excerpt import excerpt

REQUIRED_STATE: dict[type[Optimizer], tuple[str, ...]] = {Adam: ("step", "exp_avg", "exp_avg_sq")}
REQUIRED_STATE[AdamW] = REQUIRED_STATE[Adam]
"""Keys that the state of a parameter must have, by type of optimizer."""

Settings = TypeVar("Settings")

GENERATOR_STATE_BYTES = {5056: "cpu", 16: "cuda"}
"""Type of device by the size of its generators' states in torch."""

PARAMETER_SHAPED_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""Keys of an optimizer's state whose tensors have the shape and dtype of the parameter."""


def check_matching_tensor(label: str, saved: Any, expected: Tensor) -> Tensor:
    """Return the saved tensor. Raises ValueError unless it has the shape and dtype of `expected`."""
    if not isinstance(saved, Tensor):
        raise ValueError(f"{label} is a {type(saved).__name__}, not a tensor")
    if saved.shape != expected.shape or saved.dtype != expected.dtype:
        raise ValueError(
            f"{label} is {saved.dtype} {list(saved.shape)}, not {expected.dtype} {list(expected.shape)} as in this run"
        )
    return saved


def generator_device(state: Any) -> str | None:
    """Return the type of device of the generator that a saved state is of; None if it is of none."""
    return GENERATOR_STATE_BYTES.get(state.numel()) if isinstance(state, Tensor) else None


def check_generator_state(label: str, saved: Any, generator: torch.Generator) -> Tensor:
    """Return the saved state of a generator, in memory of its own. Raises ValueError unless it fits `generator`."""
    if generator_device(saved) not in (None, generator.device.type):
        raise ValueError(f"{label} is of a generator on {generator_device(saved)}, not on {generator.device.type}")
    # A clone, because torch reads the storage of a state from its start, which is wrong for a view.
    return check_matching_tensor(label, saved, generator.get_state()).cpu().clone()


def check_finite(label: str, tensor: Tensor) -> None:
    """Raise ValueError if a floating-point tensor contains NaN or infinity."""
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ValueError(f"{label} holds numbers that are not finite")


def check_index_range(label: str, tensor: Tensor, num_choices: int) -> None:
    """Raise ValueError unless all integers of the tensor lie in [0, `num_choices`)."""
    if tensor.numel() and not (tensor.min() >= 0 and tensor.max() < num_choices):
        raise ValueError(f"{label} is not one of {num_choices}")


def check_count(label: str, value: Any, maximum: int = 2**53) -> int:
    """Return the value. Raises ValueError unless it is an integer from 0 to `maximum`."""
    if type(value) is not int or not 0 <= value <= maximum:
        raise ValueError(f"{label} is {excerpt(value, 50)}, not a whole number from 0 to {maximum}")
    return value


def check_numbers(label: str, values: Any, length: int | None = None, *, finite: bool = False) -> list[float]:
    """Return the values as a list.

    Raises ValueError unless it is a list or tuple of numbers: `length` of them if given, all finite if `finite`.
    """
    if not isinstance(values, list | tuple) or length not in (None, len(values)):
        raise ValueError(f"{label} is not a list of {length if length is not None else ''} numbers".replace("  ", " "))
    if any(type(value) not in (int, float) or (finite and not isfinite(value)) for value in values):
        raise ValueError(f"{label} holds values that are not {'finite ' if finite else ''}numbers")
    return list(values)


def check_keys(label: str, value: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """Return the value. Raises ValueError unless it is a mapping with all these keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{label} is a {type(value).__name__}, not a dict")
    missing = [name for name in names if name not in value]
    if missing:
        raise ValueError(f"{label} lacks {', '.join(missing)}")
    return value


def load_settings(kind: type[Settings], saved: Any) -> Settings:
    """Return settings, a dataclass of type `kind`, given these or the plain data that `asdict` has made of them.

    Names that the data lack have their defaults. Raises ValueError if they name a setting that does not exist, or if a
    value is out of range.
    """
    if isinstance(saved, kind):
        return saved
    types = get_type_hints(kind)
    values = dict(check_keys(f"the settings {kind.__name__}", saved, ()))
    for name, value in values.items():
        hint = types.get(name)
        nested: Any = next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None)
        if nested is not None and isinstance(value, Mapping):
            values[name] = load_settings(nested, value)
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"the settings {kind.__name__} do not fit: {error}") from error


def check_weights(module: nn.Module, saved: Any) -> dict[str, Any]:
    """Return the current state dict of `module`. Raises ValueError unless names, shapes and dtypes of `saved` equal
    those of the module."""
    current = module.state_dict()
    saved = check_keys("the network's state", saved, current)
    if len(saved) > len(current):
        raise ValueError(f"the network's state has {len(saved)} parts, the network {len(current)}")
    for name, tensor in current.items():
        if isinstance(tensor, Tensor):  # a module checks its extra state itself
            check_matching_tensor(f"the network's {name}", saved[name], tensor)
    return current


def load_module(module: nn.Module, saved: Any) -> None:
    """Load a state dict into `module`. Raises ValueError unless names, shapes and dtypes are equal."""
    current = check_weights(module, saved)
    for name in current:  # in place, to keep the module versions of this program instead of the file's
        current[name] = saved[name]
    module.load_state_dict(current)


def load_optimizer(optimizer: Optimizer, saved: Any) -> None:
    """Load the state dict `saved` into `optimizer`. Raises ValueError unless it fits exactly.

    The optimizer may keep the tensors of `saved`: pass a copy if you use them again. Options such as fused or amsgrad
    keep this run's values.
    """
    check_keys("the optimizer's state", saved, ("state", "param_groups"))
    check_keys("the optimizer's state", saved["state"], ())
    groups = saved["param_groups"]
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        raise ValueError(f"the saved optimizer does not have {len(optimizer.param_groups)} parameter groups")
    loaded = [
        _merge_saved_group(saved_group, current_group)
        for saved_group, current_group in zip(groups, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": loaded})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                _check_parameter_state(optimizer, group, parameter)


def _merge_saved_group(saved: Any, group: dict[str, Any]) -> dict[str, Any]:
    """Return a saved parameter group, with this optimizer's options where they are not numbers."""
    names = [name for name in group if name != "initial_lr"]
    saved = dict(check_keys("a parameter group", saved, names))
    if not isinstance(saved["params"], list) or len(saved["params"]) != len(group["params"]):
        raise ValueError(f"a saved parameter group does not hold {len(group['params'])} parameters")
    for name, value in group.items():
        if type(value) in (int, float):
            check_numbers(f"the optimizer's {name}", [saved.get(name, value)])
        elif isinstance(value, tuple) and None not in value:
            saved[name] = tuple(check_numbers(f"the optimizer's {name}", saved[name], len(value)))
        elif name != "params":
            saved[name] = value
    return saved


def _check_parameter_state(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    required = REQUIRED_STATE.get(type(optimizer), ()) + (("max_exp_avg_sq",) if group.get("amsgrad") else ())
    state = check_keys("the optimizer's state of a parameter", optimizer.state[parameter], required)
    for name, value in state.items():
        if name in PARAMETER_SHAPED_STATE and value is not None:
            check_matching_tensor(f"the optimizer's {name}", value, parameter)
        if name == "step" and not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)):
            raise ValueError("the optimizer's step is not a number")
