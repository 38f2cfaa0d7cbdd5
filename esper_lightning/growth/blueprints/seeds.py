"""The built-in blueprints. c = channels or width C, m = inner channels; n = positions: H·W of an image [B, C, H, W],
T of a sequence [B, T, C], 1 of a vector [B, C].

`parameters` counts the weights and biases of all layers, `flops` two operations for each product with a weight; biases,
norms, activations and means do not count as FLOPs.

A seed that begins as the identity has a zeroed last linear map before the residual sum, and nothing may follow it: with
a normalisation or ReLU after a zeroed layer the gradient would stay zero.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.growth.blueprints.registry import register

MIN_INNER, MIN_SQUEEZE = 8, 4
"""Minimum number m of inner channels of a bottleneck, and of the squeeze, whose input is only C means."""

SMALL_RANK, LARGE_RANK = 8, 32  # inner width of the two kinds of lora, independent of the feature's width


class Residual(nn.Module):
    """Residual block x + body(x), where the layers of the body together keep the shape of their input.

    The last layer, also within `nn.Sequential`, is linear or a convolution, and is zeroed for birth "identity".
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
    """Learned interpolation from x to its normalisation, which keeps the shape: x + tanh(scale)·(norm(x) - x)."""

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


# Images.


@register("norm", {"image"}, parameters=lambda c: 2 * c + 1, flops=lambda c, n: 0)
def image_norm(channels: int) -> nn.Module:
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


# Sequences and vectors. All but `attention` act on each position separately.


@register("norm", {"sequence", "vector"}, parameters=lambda c: 2 * c + 1, flops=lambda c, n: 0)
def norm(width: int) -> nn.Module:
    """Build an interpolation from the identity to LayerNorm (https://arxiv.org/abs/1607.06450)."""
    return LearnedNorm(nn.LayerNorm(width))


@register(
    "lora", {"sequence", "vector"}, parameters=lambda c: 2 * c * SMALL_RANK, flops=lambda c, n: 4 * n * c * SMALL_RANK
)
def lora(width: int) -> nn.Module:
    """Build a residual linear map of rank 8 (https://arxiv.org/abs/2106.09685)."""
    return Residual(nn.Linear(width, SMALL_RANK, bias=False), nn.Linear(SMALL_RANK, width, bias=False))


@register(
    "lora_large", {"sequence"}, parameters=lambda c: 2 * c * LARGE_RANK, flops=lambda c, n: 4 * n * c * LARGE_RANK
)
def lora_large(width: int) -> nn.Module:
    """Build a residual linear map of rank 32 (https://arxiv.org/abs/2106.09685)."""
    return Residual(nn.Linear(width, LARGE_RANK, bias=False), nn.Linear(LARGE_RANK, width, bias=False))


@register("mlp_small", {"sequence", "vector"}, parameters=lambda c: 4 * c * c + 3 * c, flops=lambda c, n: 8 * n * c * c)
def mlp_small(width: int) -> nn.Module:
    """Build a residual MLP of two layers, with twice the width between them."""
    return Residual(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


@register("mlp", {"sequence", "vector"}, parameters=lambda c: 8 * c * c + 5 * c, flops=lambda c, n: 16 * n * c * c)
def mlp(width: int) -> nn.Module:
    """Build a residual MLP of two layers, four times as wide inside, as in https://arxiv.org/abs/1706.03762."""
    return Residual(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


@register("gated", {"vector"}, parameters=lambda c: 3 * c * c + 3 * c, flops=lambda c, n: 6 * n * c * c)
def gated(width: int) -> nn.Module:
    """Build a residual gated linear unit: half of a linear map gates the other (https://arxiv.org/abs/1612.08083)."""
    return Residual(nn.Linear(width, 2 * width), nn.GLU(), nn.Linear(width, width))


class CausalAttention(nn.Module):
    """Causal attention of H heads without projections: [B, T, 3C], queries, keys, values, to [B, T, C]; H divides C."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, T, C / H]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@register(
    "attention",
    {"sequence"},
    parameters=lambda c: 4 * c * c + 4 * c,
    flops=lambda c, n: 8 * n * c * c + 4 * n * n * c,  # four linear maps; scores and their weighted sums
)
def attention(width: int) -> nn.Module:
    """Build residual causal self-attention with 4, 2 or 1 heads (https://arxiv.org/abs/1706.03762)."""
    heads = next(heads for heads in (4, 2, 1) if width % heads == 0)
    return Residual(nn.Linear(width, 3 * width), CausalAttention(heads), nn.Linear(width, width))
