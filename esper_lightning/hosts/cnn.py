"""Convolutional host with slots after its blocks."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.growth.depth import depth_slots
from esper_lightning.hosts.parts import Slots, run_block


class ResidualBlock(nn.Module):
    """Pre-norm residual block that keeps the shape: BatchNorm, convolution, ReLU, convolution.

    Identity mappings: https://arxiv.org/abs/1603.05027
    """

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [B, C, H, W], same out
        return x + self.conv2(F.relu(self.conv1(self.norm(x))))


class CNN(nn.Module):
    """Blocks of convolution, BatchNorm, ReLU, slot, max-pool, slot; then mean over the image and a linear layer.

    Args:
        input_shape: Shape (C, H, W) of one image.
        outputs: Number of classes.
        base: Channels of the first block; each later block has twice as many as the one before.
        blocks: Number of blocks.
        widths: Channels of each block, instead of base and blocks; a narrow block is a bottleneck.
        kernel: Side of the convolutions; odd.
        residual: Add the input of each block to what its ReLU takes, through a 1×1 convolution where the number of
            channels changes.
        depth: Number of residual blocks at the end of each block, behind its slots.
        most: Largest number of residual blocks at the end of each block, to which copies may be added: at
            `block1.stack1`, `block1.stack2` … None: no more than `depth`.
        pools: Number of blocks that end in a 2×2 max-pool, counted from the first. None: all.
        slots: Slots in which seeds may grow: `block1` (before the pool), `block1.pool` (after it) … None: one per
            block, after its pool if it has one.
        isolate: Detach the seeds' inputs until they are fossilized (`SeedSlot.detach_input`).
        checkpoint_activations: Recompute the activations of each block in the backward pass instead of storing them,
            with the same results: 3.0 instead of 20.5 MiB for 128 images of 3×32×32, at 1.6 times the processor time.
        channels_last: Keep features as [B, H, W, C] in memory, which takes 0.60 times the processor time on 3×32×32
            images with oneDNN, and up to 1.09 times in hosts of a few channels.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        *,
        base: int = 8,
        blocks: int = 3,
        kernel: int = 3,
        pools: int | None = None,
        slots: list[str] | None = None,
        isolate: bool = False,
        checkpoint_activations: bool = False,
        channels_last: bool = True,
        widths: list[int] | None = None,
        residual: bool = False,
        depth: int = 0,
        most: int | None = None,
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise ValueError(f"host CNN needs images of shape (C, H, W), the task gives {tuple(input_shape)}")
        widths = [base * 2**i for i in range(blocks)] if widths is None else widths
        self.pools = len(widths) if pools is None else pools
        if not widths or min(widths) < 1 or kernel % 2 == 0 or kernel < 1:
            raise ValueError(f"host CNN: it needs blocks of positive widths and an odd kernel, got {widths}, {kernel}")
        if not 0 <= self.pools <= len(widths) or min(input_shape[1:]) < 2**self.pools:
            raise ValueError(
                f"host CNN: pools must lie between 0 and the number of blocks, {len(widths)}, and need images of at "
                f"least 2**pools pixels, got {self.pools} for {tuple(input_shape[1:])}"
            )
        if depth < 0 or (depth == 0 and most is not None):
            raise ValueError(f"host CNN: most needs a depth of at least 1, got depth {depth} and most {most}")
        self.checkpoint_activations = checkpoint_activations
        self.channels_last = channels_last
        shapes = list(pairwise([input_shape[0], *widths]))
        self.convs = nn.ModuleList(nn.Conv2d(c, d, kernel, padding=kernel // 2, bias=False) for c, d in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.shortcuts: nn.ModuleList | None = None
        if residual:
            self.shortcuts = nn.ModuleList(
                nn.Identity() if c == d else nn.Conv2d(c, d, 1, bias=False) for c, d in shapes
            )
        names = [[f"block{i}", f"block{i}.pool"][: 2 if i <= self.pools else 1] for i in range(1, len(widths) + 1)]
        slot_widths = {name: width for own, width in zip(names, widths, strict=True) for name in own}
        default_slots = [own[-1] for own in names]
        self.slots = Slots(default_slots if slots is None else slots, slot_widths, layout="image", isolate=isolate)
        self.residuals, self.stacks = nn.ModuleList(), nn.ModuleList()
        for i, width in enumerate(widths if depth else ()):
            self.residuals.append(nn.Sequential(*(ResidualBlock(width, kernel) for _ in range(depth))))
            places = depth_slots(self, f"residuals.{i}", most, width=width, prefix=f"block{i + 1}.")
            self.stacks.append(nn.ModuleList(places))
        self.head = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:  # [B, C, H, W] -> [B, outputs]
        if self.channels_last:
            # All later layers and seeds take over the memory format of their input; converting the weights, too, gained
            # nothing (ratios .62 and .65). Not contiguous(), which leaves an image of one channel as it is.
            x = x.clone(memory_format=torch.channels_last)
        for i in range(len(self.convs)):
            x = run_block(self, partial(self._block, i), x, checkpoint_activations=self.checkpoint_activations)
        return self.head(x.mean((2, 3)))

    def _block(self, i: int, x: Tensor) -> Tensor:  # [B, C, H, W] -> [B, C', H', W']
        y = self.norms[i](self.convs[i](x))
        y = F.relu(y if self.shortcuts is None else y + self.shortcuts[i](x))
        x = self.slots.forward_at(f"block{i + 1}", y)
        x = self.slots.forward_at(f"block{i + 1}.pool", F.max_pool2d(x, 2)) if i < self.pools else x
        return self.residuals[i](x) if self.residuals else x
