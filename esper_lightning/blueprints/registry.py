"""What can be grown: blueprints by layout and name."""

import difflib
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import nn

from esper_lightning.blueprints.initialise import build_on

Birth = Literal["identity", "random"]
"""How a seed begins: its output is exactly its input, or every layer has its usual random start."""


class Blueprint(NamedTuple):
    """A kind of seed. One name may stand for another module on each layout."""

    name: str
    layouts: frozenset[str]
    """Layouts of features it can grow on: image, sequence, vector."""
    build: Callable[[int], nn.Module]
    """Width C of the feature -> a module whose output has its input's shape."""
    parameters: Callable[[int], int]
    """Width C -> number of parameters, by arithmetic."""
    flops: Callable[[int, int], int]
    """Width C, positions (H·W of an image, T of a sequence, 1 for a vector) -> floating-point operations of the forward
    pass of one sample: two per multiply-add of a matrix product, convolution or attention, as PyTorch's FlopCounterMode
    counts. A causal mask saves nothing by this count; normalisation and elementwise work are not part of it."""
    devices: frozenset[str] | None
    """Types of device it runs on. None: all."""

    def runs_on(self, device: torch.device) -> bool:
        return self.devices is None or device.type in self.devices


Build = TypeVar("Build", bound=Callable[[int], nn.Module])

_BLUEPRINTS: dict[tuple[str, str], Blueprint] = {}  # by (layout, name)


def register(
    name: str,
    layouts: AbstractSet[str],
    parameters: Callable[[int], int],
    flops: Callable[[int, int], int],
    devices: AbstractSet[str] | None = None,
) -> Callable[[Build], Build]:
    """Decorator that makes a seed module known as `name` on `layouts`. The arguments are the fields of `Blueprint`.

    Raises ValueError if the name is taken on one of them.
    """

    def add(build: Build) -> Build:
        for layout in sorted(layouts):
            if (layout, name) in _BLUEPRINTS:
                raise ValueError(f"blueprint {name!r} is already registered for {layout} features; choose another name")
        only = None if devices is None else frozenset(devices)
        blueprint = Blueprint(name, frozenset(layouts), build, parameters, flops, only)
        _BLUEPRINTS.update({(layout, name): blueprint for layout in layouts})
        return build

    return add


def names(layout: str, device: torch.device | None = None) -> list[str]:
    """Blueprints that can grow on features of `layout`, in the order of registration; with a device, there only."""
    return [
        name
        for (its_layout, name), blueprint in _BLUEPRINTS.items()
        if its_layout == layout and (device is None or blueprint.runs_on(device))
    ]


def check_known(name: str) -> None:
    """Raises ValueError, with the nearest name, if no layout has a blueprint called `name`."""
    known = list(dict.fromkeys(known for _, known in _BLUEPRINTS))
    if name not in known:
        raise ValueError(f"unknown blueprint {name!r}; {nearest(name, known)}")


def nearest(name: str, available: Sequence[str]) -> str:
    """What somebody may have meant by a mistyped `name`, as the end of an error."""
    near = difflib.get_close_matches(name, available, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(available)}"


def get(name: str, layout: str) -> Blueprint:
    """The blueprint called `name` for features of `layout`. Raises ValueError, naming those that fit, if none is."""
    check_known(name)
    if (layout, name) not in _BLUEPRINTS:
        fitting = ", ".join(names(layout)) or "none"
        raise ValueError(f"blueprint {name!r} does not grow on {layout} features; these do: {fitting}")
    return _BLUEPRINTS[layout, name]


def build_seed(
    name: str, layout: str, width: int, device: torch.device, generator: torch.Generator, birth: Birth = "identity"
) -> nn.Module:
    """A new seed for a feature of `width` channels, its weights drawn from `generator` (on `device`).

    Both births make the same draws from `generator`, but for what a module's method `start_at_random(generator)` adds
    under birth "random". Birth "identity" is then the module's method `start_as_identity()`. Raises ValueError if the
    blueprint is unknown, does not fit, or has no such method.
    """
    blueprint = get(name, layout)
    if not blueprint.runs_on(device):
        raise ValueError(
            f"blueprint {name!r} does not run on {device.type}; it runs on: {', '.join(sorted(blueprint.devices))}"
        )
    seed = build_on(device, lambda: blueprint.build(width), generator)
    if birth == "random":
        if (start_at_random := getattr(seed, "start_at_random", None)) is not None:
            start_at_random(generator)
        return seed
    start_as_identity: Callable[[], None] | None = getattr(seed, "start_as_identity", None)
    if start_as_identity is None:
        raise ValueError(
            f"blueprint {name!r} cannot begin as the identity: build it with Residual, give its {type(seed).__name__} "
            "a method start_as_identity(), or use birth random"
        )
    start_as_identity()
    return seed
