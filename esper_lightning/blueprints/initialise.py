"""Initial weights from an explicit generator, so that a network depends on its seed alone."""

import math
from collections.abc import Callable

import torch
from torch import nn

NORMALISATION = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


def _initialise_linear(module: nn.Conv2d | nn.Linear, generator: torch.Generator) -> None:
    # The field's usual start for these layers: uniform within 1/sqrt(fan in), weight and bias alike.
    bound = 1.0 / math.sqrt(module.weight[0].numel())
    nn.init.uniform_(module.weight, -bound, bound, generator=generator)
    if module.bias is not None:
        nn.init.uniform_(module.bias, -bound, bound, generator=generator)


@torch.no_grad()
def initialise(network: nn.Module, generator: torch.Generator) -> None:
    """Sets every parameter and buffer of `network` in place; nothing else is random.

    A module that owns parameters or buffers and is neither a convolution, a linear nor a normalisation layer must have
    a method `initialise(generator)`. Modules are visited children first, so that method may also correct its children
    (zero a last layer, say). Raises ValueError for a module it cannot initialise.
    """
    for child in network.children():
        initialise(child, generator)
    own: Callable[[torch.Generator], None] | None = getattr(network, "initialise", None)
    if own is not None:
        own(generator)
    elif isinstance(network, nn.Conv2d | nn.Linear):
        _initialise_linear(network, generator)
    elif isinstance(network, NORMALISATION):
        network.reset_parameters()  # ones and zeros
    elif [*network.parameters(recurse=False), *network.buffers(recurse=False)]:
        raise ValueError(f"cannot initialise a {type(network).__name__}: give it a method initialise(generator)")


def build_on(device: torch.device, build: Callable[[], nn.Module], generator: torch.Generator) -> nn.Module:
    """Builds a module on `device` with weights from `generator`, leaving the global random state alone."""
    with torch.device("meta"):
        module = build()
    module.to_empty(device=device)
    initialise(module, generator)
    return module
