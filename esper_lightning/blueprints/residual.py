"""Forms of seeds that can begin as the identity, on any layout.

What starts at zero is the last linear map before the residual sum, and nothing follows it: a normalisation or ReLU
behind a zeroed layer would have a zero gradient for ever.
"""

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """x + body(x).

    Args:
        body: Layers whose output has their input's shape; the last one is linear, and zero at birth as the identity.
    """

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        if not body or not [*body[-1].parameters(recurse=False)]:
            last = type(body[-1]).__name__ if body else "nothing"
            raise ValueError(f"Residual: the body ends with {last}; end it with a linear layer or a convolution")
        self.body = nn.Sequential(*body)

    def start_as_identity(self) -> None:
        for parameter in self.body[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:  # same shape in and out
        return x + self.body(x)


class Norm(nn.Module):
    """x + tanh(scale)·(norm(x) - x): how far to go from x towards its normalisation is learned.

    Args:
        norm: A normalisation that keeps its input's shape.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.zeros(()))

    def initialise(self, generator: torch.Generator) -> None:
        # Draws nothing, so that under birth "identity" a generator goes on to the next seed untouched.
        self.start_as_identity()

    def start_as_identity(self) -> None:
        nn.init.zeros_(self.scale)

    def start_at_random(self, generator: torch.Generator) -> None:
        nn.init.uniform_(self.scale, -1.0, 1.0, generator=generator)

    def forward(self, x: Tensor) -> Tensor:  # same shape in and out
        return self.towards(x, self.norm(x), self.scale)

    @staticmethod
    def towards(x: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
        """What `forward` gives; `scale` broadcasts."""
        return x + torch.tanh(scale) * (normed - x)
