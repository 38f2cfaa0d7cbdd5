"""Modules that can be initialised as the identity, for any layout.

The last linear map before the residual sum is zeroed, and nothing may follow it: with a normalisation or ReLU after a
zeroed layer the gradient would stay zero.
"""

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Residual block x + body(x).

    Args:
        body: Layers whose joint output has the shape of their input. The last one is linear (or a convolution), and is
            zeroed for birth "identity".
    """

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        if not body or not [*body[-1].parameters(recurse=False)]:
            last_name = type(body[-1]).__name__ if body else "nothing"
            raise ValueError(f"Residual: the body ends with {last_name}; end it with a linear layer or a convolution")
        self.body = nn.Sequential(*body)

    def start_as_identity(self) -> None:
        """Zero the last layer, so that the output equals the input."""
        for parameter in self.body[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:  # same shape in and out
        return x + self.body(x)


class LearnedNorm(nn.Module):
    """Learned interpolation from x to its normalisation: x + tanh(scale)·(norm(x) - x).

    Args:
        norm: Normalisation that keeps the shape of its input.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.zeros(()))

    def initialise(self, generator: torch.Generator) -> None:
        # Draws no random numbers, so that with birth "identity" later seeds do not depend on this one.
        self.start_as_identity()

    def start_as_identity(self) -> None:
        """Set the scale to zero, so that the output equals the input."""
        nn.init.zeros_(self.scale)

    def start_at_random(self, generator: torch.Generator) -> None:
        """Draw the scale uniformly from [-1, 1]."""
        nn.init.uniform_(self.scale, -1.0, 1.0, generator=generator)

    def forward(self, x: Tensor) -> Tensor:  # same shape in and out
        return self.interpolate(x, self.norm(x), self.scale)

    @staticmethod
    def interpolate(x: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
        """Return x + tanh(scale)·(normed - x), the output of `forward`; `scale` broadcasts."""
        return x + torch.tanh(scale) * (normed - x)
