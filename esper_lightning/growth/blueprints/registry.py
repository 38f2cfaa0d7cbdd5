"""Registry of blueprints by layout and name, and initialisation of what they build from an explicit generator."""

import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import nn

from esper_lightning.runtime.registry import (
    check_part_name,
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
    image, T of a sequence, 1 for a vector): two per multiply-add of a product, as PyTorch's FlopCounterMode counts."""


Builder = TypeVar("Builder", bound=Callable[[int], nn.Module])
Built = TypeVar("Built", bound=nn.Module)

_BLUEPRINTS: dict[tuple[str, str], Blueprint] = {}  # by (layout, name)

STACK = "stack"
"""Layout of a depth slot, and its only blueprint: copies of the last blocks of a list, as many as at first."""


def register(
    name: str, layouts: AbstractSet[str], *, parameters: Callable[[int], int], flops: Callable[[int, int], int]
) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a seed module as `name` for `layouts`; arguments are the fields of `Blueprint`.

    A second definition of the same function, as when a cell of a notebook runs again, replaces the first. Raises
    ValueError if the name is already registered for one of the layouts, or has a dot.
    """
    check_part_name("blueprint", name)
    if isinstance(layouts, str) or not layouts:
        raise ValueError(f"blueprint {name!r}: layouts must be a set such as {{'image'}}, got {layouts!r}")

    def add(build: Builder) -> Builder:
        for layout in sorted(layouts):
            known = _BLUEPRINTS.get((layout, name))
            if known is not None and not is_same_definition(known.build, build):
                raise ValueError(f"blueprint {name!r} is already registered for {layout} features; choose another name")
        blueprint = Blueprint(name, frozenset(layouts), build, parameters, flops)
        _BLUEPRINTS.update({(layout, name): blueprint for layout in layouts})
        return build

    return add


def blueprint_names(layout: str) -> list[str]:
    """Return the names of the blueprints for `layout`, in the order of registration."""
    if layout == STACK:
        return [STACK]
    return [name for known_layout, name in _BLUEPRINTS if known_layout == layout]


def default_blueprints(layout: str) -> list[str]:
    """Return the names of this package's blueprints for `layout`: what settings offer that name none."""
    names = blueprint_names(layout)
    return [name for name in names if layout == STACK or is_of_this_package(_BLUEPRINTS[layout, name].build)]


def find_blueprint(name: str) -> str:
    """Return the name of the blueprint with a name or an import path. Raises ValueError, with a suggestion, if none."""
    if "." not in name:
        check_blueprint_name(name)
        return name
    build = import_object(name, "blueprint")
    for blueprint in _BLUEPRINTS.values():
        if blueprint.build is build:
            return blueprint.name
    raise ValueError(f"blueprint {name!r} is not one; register it by esper_lightning.growth.blueprints.register")


def check_blueprint_name(name: str) -> None:
    """Raise ValueError, with a suggestion, if no layout has a blueprint called `name`, not even an installed one."""
    if name not in {STACK, *(known for _, known in _BLUEPRINTS)}:
        import_installed()
    known_names = {known: None for _, known in _BLUEPRINTS} | {STACK: None}
    if name not in known_names:
        raise ValueError(f"unknown blueprint {name!r}; {suggest_name(name, list(known_names))}")


def get_blueprint(name: str, layout: str) -> Blueprint:
    """Return the blueprint `name` for `layout`. Raises ValueError, with the names that fit, if there is none."""
    check_blueprint_name(name)
    if (layout, name) not in _BLUEPRINTS:
        available = ", ".join(blueprint_names(layout)) or "none"
        raise ValueError(f"blueprint {name!r} does not grow on {layout} features; these do: {available}")
    return _BLUEPRINTS[layout, name]


def check_parameters(name: str, layout: str, width: int) -> None:
    """Raise ValueError if the modules of a blueprint of the user have other parameters than it declares."""
    blueprint = get_blueprint(name, layout)
    if is_of_this_package(blueprint.build):
        return
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in blueprint.build(width).parameters())
    declared = blueprint.parameters(width)
    if declared != counted:
        raise ValueError(
            f"blueprint {name!r}: parameters({width}) returns {declared}, and its module for {width} channels has "
            f"{counted}; correct the function, since growth is charged for by it"
        )


def build_seed(
    name: str, layout: str, width: int, *, device: torch.device, generator: torch.Generator, birth: Birth = "identity"
) -> nn.Module:
    """Build a seed for a feature of `width` channels, with weights drawn from `generator` (on `device`).

    First all layers are initialised at random. Then birth "random" calls the seed's method
    `start_at_random(generator)`, if it has one, and birth "identity" calls `start_as_identity()`. Raises ValueError if
    the blueprint is unknown, does not fit, or lacks `start_as_identity` for birth "identity".
    """
    blueprint = get_blueprint(name, layout)
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


# Initialisation.

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
CONSTANT_LAYERS = (*BATCH_NORMS, *INSTANCE_NORMS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.PReLU)
"""Layers whose `reset_parameters` sets constants and draws no random numbers."""


@torch.no_grad()
def initialise(network: nn.Module, generator: torch.Generator) -> None:
    """Initialise every parameter and buffer of `network` in place, with random numbers from `generator` only.

    Supports linear layers, convolutions, embeddings, normalisations and MultiheadAttention. Any other module that owns
    parameters or buffers must have a method `initialise(generator)`. Children are visited first, so that this method
    may also change them (set a last layer to zero, for example). A method `initialise_whole(generator)` initialises a
    module and all its children. Raises ValueError for an unsupported module.
    """
    initialise_whole: Callable[[torch.Generator], None] | None = getattr(network, "initialise_whole", None)
    if initialise_whole is not None:
        initialise_whole(generator)
        return
    for child in network.children():
        initialise(child, generator)
    initialise_own: Callable[[torch.Generator], None] | None = getattr(network, "initialise", None)
    if initialise_own is not None:
        initialise_own(generator)
    elif isinstance(network, (nn.Linear, *CONVOLUTIONS)):
        # PyTorch's default for these layers: uniform within 1/sqrt(fan in), for weight and bias.
        bound = 1.0 / math.sqrt(network.weight[0].numel())
        nn.init.uniform_(network.weight, -bound, bound, generator=generator)
        if network.bias is not None:
            nn.init.uniform_(network.bias, -bound, bound, generator=generator)
    elif isinstance(network, nn.Embedding | nn.EmbeddingBag):
        nn.init.normal_(network.weight, generator=generator)
        if network.padding_idx is not None:
            nn.init.zeros_(network.weight[network.padding_idx])
    elif isinstance(network, nn.MultiheadAttention):
        # The output projection is a child and initialised already; as in PyTorch, its bias starts at zero.
        for name, parameter in network.named_parameters(recurse=False):
            if name == "in_proj_bias":
                nn.init.zeros_(parameter)
            elif name in ("bias_k", "bias_v"):
                nn.init.xavier_normal_(parameter, generator=generator)
            else:
                nn.init.xavier_uniform_(parameter, generator=generator)
        if network.out_proj.bias is not None:
            nn.init.zeros_(network.out_proj.bias)
    elif isinstance(network, CONSTANT_LAYERS):
        network.reset_parameters()
    elif [*network.parameters(recurse=False), *network.buffers(recurse=False)]:
        raise ValueError(f"cannot initialise a {type(network).__name__}: give it a method initialise(generator)")


def build_on(device: torch.device, build: Callable[[], Built], generator: torch.Generator) -> Built:
    """Build a module on `device` with weights from `generator`, without using the global random state."""
    with torch.device("meta"):
        module = build()
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    module.to_empty(device=device)
    for first, *others in names.values():  # weights that were one have become several
        for owner, _, name in (other.rpartition(".") for other in others):
            setattr(module.get_submodule(owner), name, module.get_parameter(first))
    initialise(module, generator)
    return module
