"""Blueprints that treat every position alike: sequence features [B, T, C] and vectors [B, C].

c = width C, n = positions: T of a sequence, 1 for a vector.
"""

from torch import nn

from esper_lightning.blueprints.registry import register
from esper_lightning.blueprints.residual import Norm, Residual

SMALL_RANK, LARGE_RANK = 8, 32
"""Inner width of the two kinds of lora, whatever the feature's."""


@register("norm", {"sequence", "vector"}, parameters=lambda c: 2 * c + 1, flops=lambda c, n: 0)
def norm(width: int) -> nn.Module:
    """Towards LayerNorm (https://arxiv.org/abs/1607.06450)."""
    return Norm(nn.LayerNorm(width))


@register(
    "lora",
    {"sequence", "vector"},
    parameters=lambda c: 2 * c * SMALL_RANK,
    flops=lambda c, n: 4 * n * c * SMALL_RANK,
)
def lora(width: int) -> nn.Module:
    """A linear map of low rank (https://arxiv.org/abs/2106.09685)."""
    return _low_rank(width, SMALL_RANK)


@register(
    "lora_large", {"sequence"}, parameters=lambda c: 2 * c * LARGE_RANK, flops=lambda c, n: 4 * n * c * LARGE_RANK
)
def lora_large(width: int) -> nn.Module:
    """The same with a higher rank."""
    return _low_rank(width, LARGE_RANK)


@register(
    "mlp_small",
    {"sequence", "vector"},
    parameters=lambda c: 4 * c * c + 3 * c,
    flops=lambda c, n: 8 * n * c * c,
)
def mlp_small(width: int) -> nn.Module:
    """Two layers with twice the width between."""
    return _two_layers(width, 2)


@register(
    "mlp",
    {"sequence", "vector"},
    parameters=lambda c: 8 * c * c + 5 * c,
    flops=lambda c, n: 16 * n * c * c,
)
def mlp(width: int) -> nn.Module:
    """Two layers with four times the width between, as in a transformer block (https://arxiv.org/abs/1706.03762)."""
    return _two_layers(width, 4)


@register("gated", {"vector"}, parameters=lambda c: 3 * c * c + 3 * c, flops=lambda c, n: 6 * n * c * c)
def gated(width: int) -> nn.Module:
    """One half of a linear map gates the other: GLU (https://arxiv.org/abs/1612.08083)."""
    return Residual(nn.Linear(width, 2 * width), nn.GLU(), nn.Linear(width, width))


def _low_rank(width: int, rank: int) -> nn.Module:
    return Residual(nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False))


def _two_layers(width: int, factor: int) -> nn.Module:
    return Residual(nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width))
