"""Modules that can be initialised as the identity, for any layout.

The last linear map before the residual sum is zeroed, and nothing may follow it: with a normalisation or ReLU after a
zeroed layer the gradient would stay zero.
"""

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Residual block x + body(x).

    Args:
        body: Layers whose joint output has the shape of their input. The last one, which may stand within
            `nn.Sequential`, is linear (or a convolution), and is zeroed for birth "identity".
    """

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)
        last = _last_layer(self.body)
        if not [*last.parameters(recurse=False)]:
            ending = "is empty" if isinstance(last, nn.Sequential) else f"ends with {type(last).__name__}"
            raise ValueError(
                f"Residual: the body {ending}; end it with a linear layer or a convolution, as in "
                "Residual(nn.Linear(c, c), nn.ReLU(), nn.Linear(c, c))"
            )

    def start_as_identity(self) -> None:
        """Zero the last layer, so that the output equals the input."""
        for parameter in _last_layer(self.body).parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:  # same shape in and out
        return x + self.body(x)


def _last_layer(body: nn.Module) -> nn.Module:
    """Return the module whose output is that of `body`: the last one within any nesting of `nn.Sequential`."""
    return _last_layer(body[-1]) if isinstance(body, nn.Sequential) and len(body) else body


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
        self.start_as_identity()  # draws nothing, so that with birth "identity" later seeds do not depend on this one

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
