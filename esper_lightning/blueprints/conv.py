"""Blueprints for image features [B, C, H, W]. c = channels, n = H·W positions, m = inner channels.

`parameters` counts the weights and biases of all layers, `flops` two operations for each product with a weight; biases,
norms, activations and means do not count as FLOPs.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.blueprints.registry import register
from esper_lightning.blueprints.residual import LearnedNorm, Residual

MIN_INNER, MIN_SQUEEZE = 8, 4
"""Minimum number m of inner channels of a bottleneck, and of the squeeze, whose input is only C means."""


def group_norm_groups(channels: int) -> int:
    """Return the largest of 32, 16, 8, 4, 2 that divides `channels` into groups of at least 16, otherwise 1."""
    return next((g for g in (32, 16, 8, 4, 2) if channels % g == 0 and channels // g >= 16), 1)


class GroupNorm(nn.GroupNorm):
    """nn.GroupNorm without a crash of torch 2.11: see `group_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, weight=self.weight, bias=self.bias, eps=self.eps)


def group_norm(
    x: Tensor, groups: int, *, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:  # [B, C, H, W]
    """Apply F.group_norm, whose backward pass crashes torch 2.11 on the CPU for channels_last without requires_grad."""
    if torch.is_grad_enabled() and not x.requires_grad:
        # Not contiguous(), which leaves a feature of one position in channels_last, as it fits both formats.
        x = x.clone(memory_format=torch.contiguous_format)
    return F.group_norm(x, groups, weight, bias, eps)


@register("norm", {"image"}, parameters=lambda c: 2 * c + 1, flops=lambda c, n: 0)
def norm(channels: int) -> nn.Module:
    """Build an interpolation from the identity to GroupNorm (https://arxiv.org/abs/1803.08494)."""
    return LearnedNorm(GroupNorm(group_norm_groups(channels), channels))


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
    """Build a residual 1×1 convolution, which mixes the channels at each position."""
    return Residual(nn.Conv2d(channels, channels, 1))


@register(
    "depthwise", {"image"}, parameters=lambda c: 9 * c + c + c * c + c, flops=lambda c, n: 2 * n * (9 * c + c * c)
)
def depthwise(channels: int) -> nn.Module:
    """Build a residual depthwise-separable convolution: 3×3 per channel, then 1×1 (https://arxiv.org/abs/1704.04861)."""
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
    """Build a residual bottleneck: 1×1 to c / 4 channels, 3×3, 1×1 back to c (https://arxiv.org/abs/1512.03385)."""
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
    """Build a residual 3×3 convolution."""
    return Residual(nn.Conv2d(channels, channels, 3, padding=1))


@register("conv_heavy", {"image"}, parameters=lambda c: 2 * (9 * c * c + c), flops=lambda c, n: 2 * n * 18 * c * c)
def conv_heavy(channels: int) -> nn.Module:
    """Build a residual of two 3×3 convolutions with a ReLU between them."""
    return Residual(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))
