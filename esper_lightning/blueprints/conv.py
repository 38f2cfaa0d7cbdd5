"""Blueprints for image features [B, C, H, W].

All are residual and begin as the identity: the last linear map before the residual sum is zero, and nothing follows it.
A normalisation or ReLU behind a zeroed layer would have a zero gradient for ever.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.blueprints.registry import register

MIN_INNER = 8
"""Least inner channels of a bottleneck: fewer carry too little to be worth a seed."""

MIN_SQUEEZE = 4
"""Least inner channels of the squeeze: it sees only C means, so it needs fewer than a bottleneck."""


def group_norm_groups(channels: int) -> int:
    """The largest of 32, 16, 8, 4, 2 that divides `channels` with at least 16 channels a group, else 1."""
    return next((g for g in (32, 16, 8, 4, 2) if channels % g == 0 and channels // g >= 16), 1)


class Residual(nn.Module):
    """x + body(x), where the body's last layer starts at zero.

    Args:
        body: Layers from C channels to C channels; the last one is linear (a convolution).
    """

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def initialise(self, generator: torch.Generator) -> None:
        for parameter in self.body[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@register("norm", {"image"}, parameters=lambda c: 2 * c + 1)
class Norm(nn.Module):
    """x + tanh(scale)·(GroupNorm(x) - x), with scale 0 at birth."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(group_norm_groups(channels), channels)
        self.scale = nn.Parameter(torch.zeros(()))

    def initialise(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.scale) * (self.norm(x) - x)


@register("attention", {"image"}, parameters=lambda c: 2 * c * (m := max(MIN_SQUEEZE, c // 4)) + m + c)
class ChannelAttention(nn.Module):
    """Squeeze-and-excitation (https://arxiv.org/abs/1709.01507) as a residual: x·(1 + tanh(expand(squeeze(mean))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(MIN_SQUEEZE, channels // 4)
        self.squeeze = nn.Linear(channels, inner)
        self.expand = nn.Linear(inner, channels)

    def initialise(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.expand.weight)
        nn.init.zeros_(self.expand.bias)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tanh(self.expand(F.relu(self.squeeze(x.mean((2, 3))))))  # [B, C]
        return x * (1.0 + scale[:, :, None, None])


@register("conv_small", {"image"}, parameters=lambda c: c * c + c)
def conv_small(channels: int) -> nn.Module:
    """One 1×1 convolution: mixes channels at a place."""
    return Residual(nn.Conv2d(channels, channels, 1))


@register("depthwise", {"image"}, parameters=lambda c: 9 * c + c + c * c + c)
def depthwise(channels: int) -> nn.Module:
    """3×3 per channel, then 1×1 across channels (https://arxiv.org/abs/1704.04861)."""
    return Residual(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.ReLU(), nn.Conv2d(channels, channels, 1)
    )


@register("bottleneck", {"image"}, parameters=lambda c: 2 * c * (m := max(MIN_INNER, c // 4)) + 9 * m * m + 2 * m + c)
def bottleneck(channels: int) -> nn.Module:
    """1×1 down, 3×3, 1×1 up (https://arxiv.org/abs/1512.03385)."""
    inner = max(MIN_INNER, channels // 4)
    return Residual(
        nn.Conv2d(channels, inner, 1),
        nn.ReLU(),
        nn.Conv2d(inner, inner, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(inner, channels, 1),
    )


@register("conv_light", {"image"}, parameters=lambda c: 9 * c * c + c)
def conv_light(channels: int) -> nn.Module:
    """One 3×3 convolution."""
    return Residual(nn.Conv2d(channels, channels, 3, padding=1))


@register("conv_heavy", {"image"}, parameters=lambda c: 2 * (9 * c * c + c))
def conv_heavy(channels: int) -> nn.Module:
    """Two 3×3 convolutions with a ReLU between."""
    return Residual(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))
