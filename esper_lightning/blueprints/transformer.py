"""Blueprints for sequence features [B, T, C] that look at other positions, never at later ones.

c = width C, n = T positions, H heads of D = C / H channels.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from esper_lightning.blueprints.registry import register
from esper_lightning.blueprints.residual import Residual

WINDOW = 64
"""Positions that windowed attention sees: the present one and those just before it."""

MIN_FLEX_CHANNELS = 16
"""Least channels per head that FlexAttention's GPU kernel takes."""


def attention_heads(width: int) -> int:
    """4 where they divide `width`, else 2, else 1."""
    return next(heads for heads in (4, 2, 1) if width % heads == 0)


class Attend(nn.Module):
    """Each position gathers what it and all before it hold: causal scaled dot-product attention, without weights.

    Args:
        heads: Number of heads H; divides C.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, qkv: Tensor) -> Tensor:  # [B, T, 3C]: queries, keys, values -> [B, T, C]
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        return self.attend(q, k, v).transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # each [B, H, T, D] -> [B, H, T, D]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class AttendWindow(Attend):
    """The same over the last `WINDOW` positions only (https://arxiv.org/abs/2004.05150).

    By FlexAttention (https://arxiv.org/abs/2412.05496), which skips the blocks of scores that the window hides.
    """

    def __init__(self, heads: int) -> None:
        super().__init__(heads)
        self._mask: tuple[int, torch.device, BlockMask] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # each [B, H, T, D] -> [B, H, T, D]
        positions, channels = q.shape[-2:]
        missing = max(0, MIN_FLEX_CHANNELS - channels)
        q, k, v = (F.pad(each, (0, missing)) for each in (q, k, v))  # channels of zeros add nothing to the scores
        mask = self.mask(positions, q.device)
        return compiled_flex_attention()(q, k, v, block_mask=mask, scale=channels**-0.5)[..., :channels]

    def mask(self, positions: int, device: torch.device) -> BlockMask:
        """Kept, as building it takes longer than attending. A seed has its own: a common one might be made on the CUDA
        stream of one host and read on that of another before it is there."""
        if self._mask is None or self._mask[:2] != (positions, device):
            # Usable in training wherever it was first asked for.
            with torch.inference_mode(False):
                built = create_block_mask(in_window, None, None, positions, positions, device)
            self._mask = (positions, device, built)
        return self._mask[2]


def in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Whether position `query` sees position `key`."""
    return (key <= query) & (query - key < WINDOW)


@functools.cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    # Not compiled, it would compute all T×T scores; compiled here, at first use, as importing the compiler is slow.
    return torch.compile(flex_attention)


def _with_projections(width: int, attend: type[Attend]) -> nn.Module:
    return Residual(nn.Linear(width, 3 * width), attend(attention_heads(width)), nn.Linear(width, width))


def _parameters(c: int) -> int:
    return 4 * c * c + 4 * c


def _flops(c: int, n: int) -> int:
    return 8 * n * c * c + 4 * n * n * c  # four linear maps; scores, and the sums that they weigh


@register("attention", {"sequence"}, _parameters, _flops)
def attention(width: int) -> nn.Module:
    """Causal self-attention (https://arxiv.org/abs/1706.03762)."""
    return _with_projections(width, Attend)


@register("flex_attention", {"sequence"}, _parameters, _flops, devices={"cuda"})
def windowed_attention(width: int) -> nn.Module:
    """Causal self-attention within a window; its FLOPs are counted as if there were none."""
    return _with_projections(width, AttendWindow)
