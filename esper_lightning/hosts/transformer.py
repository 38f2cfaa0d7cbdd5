"""Decoder-only transformer host with slots after some of its blocks. B sequences of T tokens, width C."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.growth.depth import depth_slots
from esper_lightning.hosts.parts import Slots, run_block

INITIAL_STD = 0.02
"""Standard deviation of the initial weights, as in GPT-2."""

ROTARY_BASE = 10_000.0
"""Ratio of the longest wavelength of rotary positions to the shortest one, as in their paper."""

RMS_EPSILON = 1e-6
"""Term below the root of RMSNorm. The default of PyTorch depends on the precision of the features."""


class TokenEmbedding(nn.Embedding):
    """Token embedding whose weights also serve as the output layer (tied weights)."""

    def forward(self, input: Tensor) -> Tensor:  # [B, T], any integers -> [B, T, C]
        return super().forward(input.long())

    def logits(self, x: Tensor) -> Tensor:  # [B, T, C] -> [B, T, words]
        return F.linear(x, self.weight)


class PositionEmbedding(nn.Embedding):
    """Learned position embedding that is added to its input."""

    def forward(self, input: Tensor) -> Tensor:  # [B, T, C], same out
        return input + self.weight[: input.shape[1]]


def rotate(x: Tensor) -> Tensor:  # [..., T, C], C even -> same shape
    """Turn each pair of channels by an angle that grows with the position (https://arxiv.org/abs/2104.09864)."""
    positions, pairs = (torch.arange(n, device=x.device, dtype=torch.float32) for n in (x.shape[-2], x.shape[-1] // 2))
    angles = torch.outer(positions, ROTARY_BASE ** (-pairs / len(pairs)))  # [T, C / 2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class CausalAttention(nn.Module):
    """Causal multi-head self-attention (https://arxiv.org/abs/1706.03762)."""

    def __init__(self, width: int, heads: int, *, bias: bool = True, rotary: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.rotary = rotary
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.project = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C] -> [B, T, C]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, T, C / heads] each
        if self.rotary:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm block of attention and an MLP of four times the width (https://arxiv.org/abs/2002.04745).

    Args:
        width: Channels C.
        heads: Number of attention heads.
        rotary, rms_norm, bias: See GPT.
    """

    def __init__(self, width: int, heads: int, *, rotary: bool, rms_norm: bool, bias: bool) -> None:
        super().__init__()
        self.norm1 = make_norm(width, rms_norm=rms_norm, bias=bias)
        self.attention = CausalAttention(width, heads, bias=bias, rotary=rotary)
        self.norm2 = make_norm(width, rms_norm=rms_norm, bias=bias)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=bias), nn.GELU(), nn.Linear(4 * width, width, bias=bias)
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C] -> [B, T, C]
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def make_norm(width: int, *, rms_norm: bool, bias: bool) -> nn.Module:
    """Return the normalisation of a feature's channels."""
    return nn.RMSNorm(width, eps=RMS_EPSILON) if rms_norm else nn.LayerNorm(width, bias=bias)


class GPT(nn.Module):
    """GPT-2 (https://github.com/openai/gpt-2) for next-token prediction; the output layer is the embedding, transposed.

    Args:
        input_shape: Shape (T,) of one input: a sequence of token indices, int64.
        outputs: Size of the vocabulary.
        width: Channels C of every feature.
        blocks: Number of blocks.
        heads: Number of attention heads, each of width / heads channels.
        context: Number of position embeddings: the largest T.
        slots: Slots in which seeds may grow: `layer1` (after the first block), `layer2` … None: one after every second
            block, the last one included.
        isolate: Detach the seeds' inputs until they are fossilized (`SeedSlot.detach_input`).
        checkpoint_activations: Recompute the activations of each block in the backward pass instead of storing them,
            with the same results: 6.5 instead of 74 MiB for 512 tokens, at 1.2 times the processor time.
        rotary: Tell attention the positions by rotation, in place of position embeddings.
        rms_norm: Normalise by RMSNorm (https://arxiv.org/abs/1910.07467) in place of LayerNorm.
        bias: Give linear layers and LayerNorm a bias.
        most: Largest number of blocks, to which copies of blocks may be added: at `stack1`, `stack2` … None: no more.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        *,
        width: int = 384,
        blocks: int = 6,
        heads: int = 6,
        context: int = 256,
        slots: list[str] | None = None,
        isolate: bool = False,
        checkpoint_activations: bool = False,
        rotary: bool = False,
        rms_norm: bool = False,
        bias: bool = True,
        most: int | None = None,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ValueError(f"host GPT needs sequences of tokens of shape (T,), the task gives {tuple(input_shape)}")
        if min(width, blocks, heads) < 1 or width % heads or (rotary and width // heads % 2):
            raise ValueError(
                f"host GPT: width, blocks and heads must be positive, heads must divide width (with rotary positions "
                f"into an even number), got {width}, {blocks}, {heads}"
            )
        if input_shape[0] > context:
            raise ValueError(f"host GPT: context must be at least {input_shape[0]}, the task's length, got {context}")
        self.checkpoint_activations = checkpoint_activations
        self.tokens = TokenEmbedding(outputs, width)
        self.positions = nn.Identity() if rotary else PositionEmbedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, rotary=rotary, rms_norm=rms_norm, bias=bias) for _ in range(blocks)
        )
        slot_widths = {f"layer{i + 1}": width for i in range(blocks)}
        self.slots = Slots(
            list(slot_widths)[(blocks - 1) % 2 :: 2] if slots is None else slots,
            slot_widths,
            layout="sequence",
            isolate=isolate,
        )
        self.stacks = nn.ModuleList(depth_slots(self, "blocks", most, width=width))
        self.norm = make_norm(width, rms_norm=rms_norm, bias=bias)

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise as GPT-2: normal weights, zero biases, residual projections scaled by 1 / √(2 · blocks)."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_STD, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        blocks = [module for module in self.modules() if isinstance(module, Block)]
        for block in blocks:
            for last in (block.attention.project, block.mlp[-1]):
                assert isinstance(last, nn.Linear)
                nn.init.normal_(last.weight, std=INITIAL_STD / math.sqrt(2 * len(blocks)), generator=generator)

    def forward(self, x: Tensor) -> Tensor:  # [B, T] int64 -> [B, T, outputs]
        x = self.positions(self.tokens(x))
        for i in range(len(self.blocks)):
            x = run_block(self, partial(self._block, i), x, checkpoint_activations=self.checkpoint_activations)
        # Not a second, tied Parameter: it would lose the tie when a host is built on the meta device.
        return self.tokens.logits(self.norm(x))

    def _block(self, i: int, x: Tensor) -> Tensor:  # [B, T, C] -> [B, T, C]
        return self.slots.forward_at(f"layer{i + 1}", self.blocks[i](x))
