"""A plain convolutional host with slots after its blocks."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.growth.network import check_slot_names
from esper_lightning.growth.slot import SeedSlot


class CNN(nn.Module):
    """Blocks of convolution, BatchNorm, ReLU, slot, max-pool, slot; then mean over the image and a linear layer.

    Args:
        input_shape: Shape (C, H, W) of one image.
        outputs: Number of classes.
        base: Channels of the first block; each block has twice the one before.
        blocks: Number of blocks.
        kernel: Side of the convolutions; odd.
        pools: Number of blocks that end in a 2×2 max-pool, from the first on. None: all.
        slots: Where seeds may grow: `block1` (before the pool), `block1.pool` (after it) … None: after every block,
            behind its pool if it has one.
        isolate: See SeedSlot.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        base: int = 8,
        blocks: int = 3,
        kernel: int = 3,
        pools: int | None = None,
        slots: list[str] | None = None,
        isolate: bool | None = None,
    ) -> None:
        super().__init__()
        self.pools = blocks if pools is None else pools
        _check(input_shape, base, blocks, kernel, self.pools)
        places = {f"block{i + 1}": i for i in range(blocks)} | {f"block{i + 1}.pool": i for i in range(self.pools)}
        if slots is None:
            slots = [f"block{i + 1}.pool" if i < self.pools else f"block{i + 1}" for i in range(blocks)]
        check_slot_names(slots, places)

        widths = [input_shape[0]] + [base * 2**i for i in range(blocks)]
        self.convs = nn.ModuleList(
            nn.Conv2d(c, d, kernel, padding=kernel // 2, bias=False) for c, d in pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.slots = nn.ModuleDict()
        for name in sorted(slots, key=lambda name: (places[name], name)):  # the order of the data's way
            # nn.ModuleDict allows no dots in keys; the slot's own name keeps it.
            self.slots[name.replace(".", "_")] = SeedSlot(name, "image", widths[places[name] + 1], isolate)
        self.head = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:  # [B, C, H, W] -> [B, outputs]
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = self._grow(f"block{i + 1}", F.relu(norm(conv(x))))
            if i < self.pools:
                x = self._grow(f"block{i + 1}_pool", F.max_pool2d(x, 2))
        return self.head(x.mean((2, 3)))

    def _grow(self, key: str, x: Tensor) -> Tensor:
        return self.slots[key](x) if key in self.slots else x


def _check(input_shape: Sequence[int], base: int, blocks: int, kernel: int, pools: int) -> None:
    if len(input_shape) != 3:
        raise ValueError(f"host CNN needs images of shape (C, H, W), the task gives {tuple(input_shape)}")
    if base < 1 or blocks < 1 or kernel < 1:
        raise ValueError(f"host CNN: base, blocks and kernel must be positive, got {base}, {blocks}, {kernel}")
    if kernel % 2 == 0:
        raise ValueError(f"host CNN: kernel must be odd to keep the image's size, got {kernel}")
    if not 0 <= pools <= blocks:
        raise ValueError(f"host CNN: pools must lie between 0 and blocks = {blocks}, got {pools}")
    if min(input_shape[1:]) < 2**pools:
        raise ValueError(f"host CNN: {pools} pools need images of at least {2**pools} pixels, got {input_shape[1:]}")
