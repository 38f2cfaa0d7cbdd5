"""Causal self-attention blueprints for sequence features [B, T, C].

c = width C, n = T positions, H heads of D = C / H channels.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from esper_lightning.blueprints.registry import register
from esper_lightning.blueprints.residual import Residual

WINDOW = 64
"""Number of positions in the attention window: the present one and those directly before it."""

MIN_FLEX_CHANNELS = 16
"""Minimum number of channels per head in FlexAttention's GPU kernel."""


def attention_heads(width: int) -> int:
    """Return the number of heads: the largest of 4, 2, 1 that divides `width`."""
    return next(heads for heads in (4, 2, 1) if width % heads == 0)


class AttentionCore(nn.Module):
    """Causal scaled dot-product attention without projections: each position attends to itself and all earlier ones.

    Args:
        heads: Number of heads H, which must divide C.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, qkv: Tensor) -> Tensor:  # [B, T, 3C]: queries, keys, values -> [B, T, C]
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        return self.attend(q, k, v).transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # each [B, H, T, D] -> [B, H, T, D]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class WindowedAttentionCore(AttentionCore):
    """Causal attention over the last `WINDOW` positions only (https://arxiv.org/abs/2004.05150).

    It uses FlexAttention (https://arxiv.org/abs/2412.05496), which skips blocks of scores outside the window.
    """

    def __init__(self, heads: int) -> None:
        super().__init__(heads)
        self._mask: tuple[int, torch.device, BlockMask] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # each [B, H, T, D] -> [B, H, T, D]
        positions, channels = q.shape[-2:]
        padding = max(0, MIN_FLEX_CHANNELS - channels)
        q, k, v = (F.pad(each, (0, padding)) for each in (q, k, v))  # zero channels do not change the scores
        mask = self.block_mask(positions, q.device)
        return compiled_flex_attention(q.shape[-1])(q, k, v, block_mask=mask, scale=channels**-0.5)[..., :channels]

    def block_mask(self, positions: int, device: torch.device) -> BlockMask:
        """Return the block mask of the window, cached because building it takes longer than the attention itself.

        The cache belongs to this module: a shared mask might be built on the CUDA stream of one host and read on the
        stream of another before it is complete.
        """
        if self._mask is None or self._mask[:2] != (positions, device):
            # The cached mask must be usable in training even if it is first built in inference mode.
            with torch.inference_mode(False):
                built = create_block_mask(in_window, None, None, positions, positions, device)
            self._mask = (positions, device, built)
        return self._mask[2]


def in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return True where position `query` may attend to position `key`."""
    return (key <= query) & (query - key < WINDOW)


@functools.cache
def compiled_flex_attention(channels: int) -> Callable[..., Tensor]:
    """Return FlexAttention compiled for heads of this many channels, and for any number of samples and positions.

    Uncompiled it would compute all T×T scores. It is compiled at first use, because importing the compiler is slow.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return flex_attention(q, k, v, **options)

    # torch compiles a code object at most eight times and runs it uncompiled afterwards, so each size gets its own.
    attend.__code__ = attend.__code__.replace(co_name=f"attend_{channels}")
    return torch.compile(attend, dynamic=True)


def _residual_attention(width: int, core_type: type[AttentionCore]) -> nn.Module:
    return Residual(nn.Linear(width, 3 * width), core_type(attention_heads(width)), nn.Linear(width, width))


def _parameters(c: int) -> int:
    return 4 * c * c + 4 * c


def _flops(c: int, n: int) -> int:
    return 8 * n * c * c + 4 * n * n * c  # four linear maps; scores and their weighted sums


@register("attention", {"sequence"}, parameters=_parameters, flops=_flops)
def attention(width: int) -> nn.Module:
    """Build residual causal self-attention (https://arxiv.org/abs/1706.03762)."""
    return _residual_attention(width, AttentionCore)


@register("flex_attention", {"sequence"}, parameters=_parameters, flops=_flops, devices={"cuda"})
def windowed_attention(width: int) -> nn.Module:
    """Build residual causal self-attention within a window; FLOPs are counted as without the window."""
    return _residual_attention(width, WindowedAttentionCore)
