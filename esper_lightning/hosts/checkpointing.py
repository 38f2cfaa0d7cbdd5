"""Activation checkpointing (https://arxiv.org/abs/1604.06174): less memory and more arithmetic, same results."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from esper_lightning.growth.nested import preserved_buffers
from esper_lightning.hosts.dropout import dropout_generators


def run_block(host: nn.Module, block: Callable[[Tensor], Tensor], x: Tensor, *, checkpoint_activations: bool) -> Tensor:
    """Return `block(x)` for a part of `host`; with `checkpoint_activations` only `x` is stored for the backward pass.

    The backward pass then computes the block again. In evaluation mode and without gradients the option has no effect.
    Outputs, gradients and buffers equal those of `block(x)` bit for bit.
    """
    if not (checkpoint_activations and host.training and torch.is_grad_enabled()):
        return block(x)
    states = [generator.get_state() for generator in dropout_generators(host)]
    return checkpoint(block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _repeat(host, states)))


@contextmanager
def _repeat(network: nn.Module, states: Sequence[Tensor]) -> Iterator[None]:
    """Begin with `states` of the generators of dropout, and discard writes to buffers and generators afterwards.

    Without it BatchNorm would count a recomputed batch twice, see https://github.com/pytorch/pytorch/issues/96136, and
    dropout would draw other masks: torch restores its global generators only.
    """
    generators = dropout_generators(network)
    later_states = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    try:
        with preserved_buffers(network):
            yield
    finally:
        for generator, state in zip(generators, later_states, strict=True):
            generator.set_state(state)
