"""Initialisation from an explicit generator, so that a network depends on its RNG seed alone."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

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


Built = TypeVar("Built", bound=nn.Module)


def build_on(device: torch.device, build: Callable[[], Built], generator: torch.Generator) -> Built:
    """Build a module on `device` with weights from `generator`, without using the global random state."""
    with torch.device("meta"):
        module = build()
    module.to_empty(device=device)
    initialise(module, generator)
    return module
