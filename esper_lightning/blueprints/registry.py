"""Registry of blueprints by layout and name."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import nn

from esper_lightning.blueprints.initialise import build_on
from esper_lightning.plugins import (
    PartError,
    check_part_name,
    check_takes,
    import_installed,
    import_object,
    is_of_this_package,
    is_same_definition,
    suggest_name,
)

Birth = Literal["identity", "random"]
"""Initial state of a seed: its output is exactly its input, or every layer has its usual random initialisation."""


class Blueprint(NamedTuple):
    """A kind of seed. One name may denote a different module for each layout."""

    name: str
    """Name under which the blueprint is registered."""
    layouts: frozenset[str]
    """Supported layouts of features: image, sequence, vector."""
    build: Callable[[int], nn.Module]
    """Function of the feature's width C that builds a module whose output has the shape of its input."""
    parameters: Callable[[int], int]
    """Number of parameters, as a function of the width C."""
    flops: Callable[[int, int], int]
    """FLOPs of the forward pass for one sample, as a function of the width C and the number of positions (H·W of an
    image, T of a sequence, 1 for a vector): two per multiply-add of a matrix product, convolution or attention, as in
    PyTorch's FlopCounterMode. A causal mask does not lower the count; normalisation and elementwise operations are
    not counted."""
    devices: frozenset[str] | None
    """Supported device types. None: all."""

    def runs_on(self, device: torch.device) -> bool:
        """Return True if the blueprint supports the type of `device`."""
        return self.devices is None or device.type in self.devices


Builder = TypeVar("Builder", bound=Callable[[int], nn.Module])

_BLUEPRINTS: dict[tuple[str, str], Blueprint] = {}  # by (layout, name)


def register(
    name: str,
    layouts: AbstractSet[str],
    *,
    parameters: Callable[[int], int],
    flops: Callable[[int, int], int],
    devices: AbstractSet[str] | None = None,
) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a seed module as `name` for `layouts`; arguments are the fields of `Blueprint`.

    A second definition of the same function, as when a cell of a notebook runs again, replaces the first. Raises
    ValueError if the name is already registered for one of the layouts, or has a dot, or if a
    function takes other arguments.
    """
    check_part_name("blueprint", name)
    if isinstance(layouts, str) or not layouts:
        raise PartError(f"blueprint {name!r}: layouts must be a set such as {{'image'}}, got {layouts!r}")

    def add(build: Builder) -> Builder:
        for layout in sorted(layouts):
            known = _BLUEPRINTS.get((layout, name))
            if known is not None and not is_same_definition(known.build, build):
                raise PartError(f"blueprint {name!r} is already registered for {layout} features; choose another name")
        check_takes(build, f"blueprint {name!r}", "channels")
        check_takes(parameters, f"blueprint {name!r}: parameters", "channels")
        check_takes(flops, f"blueprint {name!r}: flops", "channels", "positions")
        device_types = None if devices is None else frozenset(devices)
        blueprint = Blueprint(name, frozenset(layouts), build, parameters, flops, device_types)
        _BLUEPRINTS.update({(layout, name): blueprint for layout in layouts})
        return build

    return add


def blueprint_names(layout: str, device: torch.device | None = None) -> list[str]:
    """Return the names of the blueprints for `layout` (and `device`, if given), in the order of registration."""
    return [
        name
        for (known_layout, name), blueprint in _BLUEPRINTS.items()
        if known_layout == layout and (device is None or blueprint.runs_on(device))
    ]


def default_blueprints(layout: str) -> list[str]:
    """Return the names of this package's blueprints for `layout` on every device: what settings offer that name none.

    A blueprint that runs on some devices only must be named, so that the action space does not depend on the device.
    """
    blueprints = [_BLUEPRINTS[layout, name] for name in blueprint_names(layout)]
    return [b.name for b in blueprints if b.devices is None and is_of_this_package(b.build)]


def find_blueprint(name: str) -> str:
    """Return the name of the blueprint with a name or an import path, whose module is then imported.

    Raises ValueError, with a suggestion, if there is none.
    """
    if "." not in name:
        check_blueprint_name(name)
        return name
    build = import_object(name, "blueprint")
    for blueprint in _BLUEPRINTS.values():
        if blueprint.build is build:
            return blueprint.name
    raise ValueError(f"blueprint {name!r} is not one; register it by esper_lightning.blueprints.register")


def check_blueprint_name(name: str) -> None:
    """Raise ValueError, with a suggestion, if no layout has a blueprint called `name`, not even an installed one."""
    if name not in _known_names():
        import_installed()
    if name not in (known := _known_names()):
        raise ValueError(f"unknown blueprint {name!r}; {suggest_name(name, known)}")


def _known_names() -> list[str]:
    return list(dict.fromkeys(name for _, name in _BLUEPRINTS))


def get_blueprint(name: str, layout: str) -> Blueprint:
    """Return the blueprint `name` for `layout`. Raises ValueError, with the names that fit, if there is none."""
    check_blueprint_name(name)
    if (layout, name) not in _BLUEPRINTS:
        available = ", ".join(blueprint_names(layout)) or "none"
        raise ValueError(f"blueprint {name!r} does not grow on {layout} features; these do: {available}")
    return _BLUEPRINTS[layout, name]


def check_parameters(name: str, layout: str, width: int) -> None:
    """Raise PartError if the modules of a blueprint of the user have other parameters than it declares."""
    blueprint = get_blueprint(name, layout)
    if is_of_this_package(blueprint.build):
        return
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in _build(blueprint, width).parameters())
    declared = blueprint.parameters(width)
    if declared != counted:
        raise PartError(
            f"blueprint {name!r}: parameters({width}) returns {declared!r:.30}, and its module for {width} channels "
            f"has {counted}; correct the function, since growth is charged for by it"
        )


def _build(blueprint: Blueprint, width: int) -> nn.Module:
    """Build a module, still without initialised weights. Raises ValueError if the function returns something else."""
    seed: object = blueprint.build(width)
    if not isinstance(seed, nn.Module):
        raise ValueError(f"blueprint {blueprint.name!r} built a {type(seed).__name__}; return an nn.Module")
    return seed


def build_seed(
    name: str, layout: str, width: int, *, device: torch.device, generator: torch.Generator, birth: Birth = "identity"
) -> nn.Module:
    """Build a seed for a feature of `width` channels, with weights drawn from `generator` (on `device`).

    First all layers are initialised at random. Then birth "random" calls the seed's method
    `start_at_random(generator)`, if it has one, and birth "identity" calls `start_as_identity()`. Raises ValueError if
    the blueprint is unknown, does not fit, or lacks `start_as_identity` for birth "identity".
    """
    blueprint = get_blueprint(name, layout)
    if not blueprint.runs_on(device):
        supported = ", ".join(sorted(blueprint.devices or ()))
        raise ValueError(f"blueprint {name!r} does not run on {device.type}; it runs on: {supported}")
    seed = build_on(device, lambda: _build(blueprint, width), generator)
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
