"""Blueprints for sequences [B, T, C] and vectors [B, C]. c = width C, n = positions: T of a sequence, 1 of a vector.

All but `attention` act on each position separately.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.blueprints.registry import register
from esper_lightning.blueprints.residual import LearnedNorm, Residual

SMALL_RANK, LARGE_RANK = 8, 32
"""Inner width of the two kinds of lora, independent of the feature's width."""


@register("norm", {"sequence", "vector"}, parameters=lambda c: 2 * c + 1, flops=lambda c, n: 0)
def norm(width: int) -> nn.Module:
    """Build an interpolation from the identity to LayerNorm (https://arxiv.org/abs/1607.06450)."""
    return LearnedNorm(nn.LayerNorm(width))


@register(
    "lora", {"sequence", "vector"}, parameters=lambda c: 2 * c * SMALL_RANK, flops=lambda c, n: 4 * n * c * SMALL_RANK
)
def lora(width: int) -> nn.Module:
    """Build a residual linear map of rank 8 (https://arxiv.org/abs/2106.09685)."""
    return _low_rank(width, SMALL_RANK)


@register(
    "lora_large", {"sequence"}, parameters=lambda c: 2 * c * LARGE_RANK, flops=lambda c, n: 4 * n * c * LARGE_RANK
)
def lora_large(width: int) -> nn.Module:
    """Build a residual linear map of rank 32 (https://arxiv.org/abs/2106.09685)."""
    return _low_rank(width, LARGE_RANK)


@register("mlp_small", {"sequence", "vector"}, parameters=lambda c: 4 * c * c + 3 * c, flops=lambda c, n: 8 * n * c * c)
def mlp_small(width: int) -> nn.Module:
    """Build a residual MLP of two layers, with twice the width between them."""
    return _two_layers(width, 2)


@register("mlp", {"sequence", "vector"}, parameters=lambda c: 8 * c * c + 5 * c, flops=lambda c, n: 16 * n * c * c)
def mlp(width: int) -> nn.Module:
    """Build a residual MLP of two layers, four times as wide inside, as in https://arxiv.org/abs/1706.03762."""
    return _two_layers(width, 4)


@register("gated", {"vector"}, parameters=lambda c: 3 * c * c + 3 * c, flops=lambda c, n: 6 * n * c * c)
def gated(width: int) -> nn.Module:
    """Build a residual gated linear unit: half of a linear map gates the other (https://arxiv.org/abs/1612.08083)."""
    return Residual(nn.Linear(width, 2 * width), nn.GLU(), nn.Linear(width, width))


class CausalAttention(nn.Module):
    """Causal scaled dot-product attention without projections: [B, T, 3C], queries, keys, values, to [B, T, C].

    Args:
        heads: Number of heads H, which must divide C.
    """

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


def _low_rank(width: int, rank: int) -> nn.Module:
    return Residual(nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False))


def _two_layers(width: int, factor: int) -> nn.Module:
    return Residual(nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width))
