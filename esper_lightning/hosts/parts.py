"""Parts that the hosts share: slots by name, dropout, and blocks whose activations are computed again, not stored."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from esper_lightning.growth.lifecycle import check_slot_names
from esper_lightning.growth.nested import preserved_buffers
from esper_lightning.growth.slot import Layout, SeedSlot


class Slots(nn.ModuleDict):
    """The slots of a host, at a subset of the positions where it allows them.

    Args:
        slot_names: Names of the slots to create, in any order.
        slot_widths: Names of all possible slots with the width C of the feature there, in forward order.
        layout: Layout of the features.
        isolate: See SeedSlot.
    """

    def __init__(
        self, slot_names: Sequence[str], slot_widths: Mapping[str, int], *, layout: Layout, isolate: bool | None
    ) -> None:
        check_slot_names(slot_names, slot_widths)
        super().__init__(
            {
                _module_key(name): SeedSlot(name, layout, slot_widths[name], detach_input=isolate)
                for name in slot_widths
                if name in slot_names
            }
        )

    def forward_at(self, name: str, x: Tensor) -> Tensor:  # same shape in and out
        """Return the output of the named slot for the feature `x`, or `x` itself if there is no such slot."""
        key = _module_key(name)
        return self[key](x) if key in self else x


def _module_key(name: str) -> str:
    # nn.ModuleDict allows no dots in keys; `SeedSlot.name` keeps the dot.
    return name.replace(".", "_")


class Dropout(nn.Module):
    """Dropout (https://jmlr.org/papers/v15/srivastava14a.html) with random numbers from the host's own generator.

    nn.Dropout draws from torch's global generator, so the masks of one host would depend on the other hosts of a pool
    and on the order in which an executor trains them. Evaluation mode switches dropout off.

    Args:
        p: Probability that an element is set to zero, in [0, 1).

    Attributes:
        generators: Generators of the hosts whose samples form the batch: one for a host by itself, V for a stack of V
            hosts. None: torch's global generator, for a network that no generator has initialised.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generators: list[torch.Generator | None] = [None]

    def initialise(self, generator: torch.Generator) -> None:
        """Use `generator` from now on; draws no random numbers."""
        self.generators = [generator]

    def forward(self, x: Tensor) -> Tensor:  # [B, …], or [V·B, …] host by host; same shape out
        if not self.training:
            return x
        kept = [
            torch.rand(own.shape, generator=generator, device=x.device) >= self.p
            for own, generator in zip(x.chunk(len(self.generators)), self.generators, strict=True)
        ]
        return x * torch.cat(kept) / (1.0 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def dropout_generators(network: nn.Module) -> list[torch.Generator]:
    """Return the generators of all dropout layers of a network, each once."""
    used = [own for layer in network.modules() if isinstance(layer, Dropout) for own in layer.generators]
    return list({id(generator): generator for generator in used if generator is not None}.values())


def run_block(host: nn.Module, block: Callable[[Tensor], Tensor], x: Tensor, *, checkpoint_activations: bool) -> Tensor:
    """Return `block(x)` for a part of `host`; with `checkpoint_activations` only `x` is stored for the backward pass.

    The backward pass then computes the block again (https://arxiv.org/abs/1604.06174). In evaluation mode and without
    gradients the option has no effect. Outputs, gradients and buffers equal those of `block(x)` bit for bit.
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
