"""What can be grown: blueprints by name."""

import difflib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from esper_lightning.blueprints.initialise import build_on


class Blueprint(NamedTuple):
    """A kind of seed."""

    name: str
    layouts: frozenset[str]
    """Layouts of features it can grow on: image, sequence, vector."""
    build: Callable[[int], nn.Module]
    """Width C of the feature -> a module whose output has its input's shape."""
    parameters: Callable[[int], int]
    """Width C -> number of parameters, by arithmetic."""


Build = TypeVar("Build", bound=Callable[[int], nn.Module])

_BLUEPRINTS: dict[str, Blueprint] = {}


def register(name: str, layouts: set[str], parameters: Callable[[int], int]) -> Callable[[Build], Build]:
    """Decorator that makes a seed module known as `name`. Raises ValueError if the name is taken."""

    def add(build: Build) -> Build:
        if name in _BLUEPRINTS:
            raise ValueError(f"blueprint {name!r} is already registered; choose another name")
        _BLUEPRINTS[name] = Blueprint(name, frozenset(layouts), build, parameters)
        return build

    return add


def names(layout: str) -> list[str]:
    """Blueprints that can grow on features of `layout`, in the order of registration."""
    return [name for name, blueprint in _BLUEPRINTS.items() if layout in blueprint.layouts]


def get(name: str) -> Blueprint:
    """The blueprint called `name`. Raises ValueError, with the nearest name, if there is none."""
    if name not in _BLUEPRINTS:
        near = difflib.get_close_matches(name, _BLUEPRINTS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_BLUEPRINTS)}"
        raise ValueError(f"unknown blueprint {name!r}; {hint}")
    return _BLUEPRINTS[name]


def build_seed(name: str, layout: str, width: int, device: torch.device, generator: torch.Generator) -> nn.Module:
    """A new seed for a feature of `width` channels, its weights drawn from `generator` (on `device`)."""
    blueprint = get(name)
    if layout not in blueprint.layouts:
        raise ValueError(f"blueprint {name!r} does not grow on {layout} features; these do: {', '.join(names(layout))}")
    return build_on(device, lambda: blueprint.build(width), generator)
