"""Dropout whose random numbers belong to one host."""

import torch
from torch import Tensor, nn


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
