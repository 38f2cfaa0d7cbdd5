"""Blueprints for image features [B, C, H, W]. c = channels, n = H·W places, m = inner channels.

Sizes are those of the layers in order, a weight and a bias each.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.blueprints.registry import register
from esper_lightning.blueprints.residual import Norm, Residual

MIN_INNER = 8
"""Least inner channels of a bottleneck: fewer carry too little to be worth a seed."""

MIN_SQUEEZE = 4
"""Least inner channels of the squeeze: it sees only C means, so it needs fewer than a bottleneck."""


def group_norm_groups(channels: int) -> int:
    """The largest of 32, 16, 8, 4, 2 that divides `channels` with at least 16 channels a group, else 1."""
    return next((g for g in (32, 16, 8, 4, 2) if channels % g == 0 and channels // g >= 16), 1)


class GroupNorm(nn.GroupNorm):
    """nn.GroupNorm that can learn from a feature that needs no gradient, whatever its memory format.

    On the CPU torch 2.11 crashes in the backward pass of the original if such a feature is in channels_last.
    """

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:  # [B, C, H, W]
    """F.group_norm, spared that crash."""
    if torch.is_grad_enabled() and not x.requires_grad:
        # Not contiguous(): to it a feature of one position has either format already.
        x = x.clone(memory_format=torch.contiguous_format)
    return F.group_norm(x, groups, weight, bias, eps)


@register("norm", {"image"}, parameters=lambda c: 2 * c + 1, flops=lambda c, n: 0)
def norm(channels: int) -> nn.Module:
    """Towards GroupNorm (https://arxiv.org/abs/1803.08494)."""
    return Norm(GroupNorm(group_norm_groups(channels), channels))


@register(
    "attention",
    {"image"},
    parameters=lambda c: 2 * c * (m := max(MIN_SQUEEZE, c // 4)) + m + c,
    flops=lambda c, n: 4 * c * max(MIN_SQUEEZE, c // 4),
)
class ChannelAttention(nn.Module):
    """Squeeze-and-excitation (https://arxiv.org/abs/1709.01507) as a residual: x·(1 + tanh(expand(squeeze(mean))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(MIN_SQUEEZE, channels // 4)
        self.squeeze = nn.Linear(channels, inner)
        self.expand = nn.Linear(inner, channels)

    def start_as_identity(self) -> None:
        nn.init.zeros_(self.expand.weight)
        nn.init.zeros_(self.expand.bias)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tanh(self.expand(F.relu(self.squeeze(x.mean((2, 3))))))  # [B, C]
        return x * (1.0 + scale[:, :, None, None])


@register("conv_small", {"image"}, parameters=lambda c: c * c + c, flops=lambda c, n: 2 * n * c * c)
def conv_small(channels: int) -> nn.Module:
    """One 1×1 convolution: mixes channels at a place."""
    return Residual(nn.Conv2d(channels, channels, 1))


@register(
    "depthwise",
    {"image"},
    parameters=lambda c: 9 * c + c + c * c + c,
    flops=lambda c, n: 2 * n * (9 * c + c * c),
)
def depthwise(channels: int) -> nn.Module:
    """3×3 per channel, then 1×1 across channels (https://arxiv.org/abs/1704.04861)."""
    return Residual(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.ReLU(), nn.Conv2d(channels, channels, 1)
    )


@register(
    "bottleneck",
    {"image"},
    parameters=lambda c: 2 * c * (m := max(MIN_INNER, c // 4)) + 9 * m * m + 2 * m + c,
    flops=lambda c, n: 2 * n * (2 * c * (m := max(MIN_INNER, c // 4)) + 9 * m * m),
)
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


@register("conv_light", {"image"}, parameters=lambda c: 9 * c * c + c, flops=lambda c, n: 2 * n * 9 * c * c)
def conv_light(channels: int) -> nn.Module:
    """One 3×3 convolution."""
    return Residual(nn.Conv2d(channels, channels, 3, padding=1))


@register("conv_heavy", {"image"}, parameters=lambda c: 2 * (9 * c * c + c), flops=lambda c, n: 2 * n * 18 * c * c)
def conv_heavy(channels: int) -> nn.Module:
    """Two 3×3 convolutions with a ReLU between."""
    return Residual(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))
