"""Parts that the hosts share, slots by name and blocks that are computed again; and the fully connected host."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from esper_lightning.growth.lifecycle import check_slot_names
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.runtime.nested import preserved_buffers


class Slots(nn.ModuleDict):
    """The slots of a host, at a subset of the positions where it allows them.

    Args:
        slot_names: Names of the slots to create, in any order.
        slot_widths: Names of all possible slots with the width C of the feature there, in forward order.
        layout: Layout of the features.
        isolate: Detach the seeds' inputs until they are fossilized (`SeedSlot.detach_input`).
    """

    def __init__(
        self, slot_names: Sequence[str], slot_widths: Mapping[str, int], *, layout: Layout, isolate: bool
    ) -> None:
        check_slot_names(slot_names, slot_widths)
        slots = {
            name: SeedSlot(name, layout, width, detach_input=isolate)
            for name, width in slot_widths.items()
            if name in slot_names
        }
        # nn.ModuleDict allows no dots in keys; `SeedSlot.name` keeps the dot.
        super().__init__({name.replace(".", "_"): slot for name, slot in slots.items()})

    def forward_at(self, name: str, x: Tensor) -> Tensor:  # same shape in and out
        """Return the output of the named slot for the feature `x`, or `x` itself if there is no such slot."""
        key = name.replace(".", "_")
        return self[key](x) if key in self else x


def run_block(host: nn.Module, block: Callable[[Tensor], Tensor], x: Tensor, *, checkpoint_activations: bool) -> Tensor:
    """Return `block(x)` for a part of `host`; with `checkpoint_activations` only `x` is stored for the backward pass.

    The backward pass then computes the block again (https://arxiv.org/abs/1604.06174). In evaluation mode and without
    gradients the option has no effect. Outputs, gradients and buffers equal those of `block(x)` bit for bit.
    """
    if not (checkpoint_activations and host.training and torch.is_grad_enabled()):
        return block(x)
    # Without preserved buffers BatchNorm would count a recomputed batch twice, see
    # https://github.com/pytorch/pytorch/issues/96136.
    return checkpoint(block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), preserved_buffers(host)))


class MLP(nn.Module):
    """Hidden layers of linear map, ReLU, slot; then a linear layer.

    Args:
        input_shape: Shape of one input; it is flattened.
        outputs: Number of classes or quantities.
        width: Units of each hidden layer.
        layers: Number of hidden layers.
        slots: Slots in which seeds may grow: `layer1`, `layer2` … None: one after every hidden layer.
        isolate: Detach the seeds' inputs until they are fossilized (`SeedSlot.detach_input`).
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        *,
        width: int = 128,
        layers: int = 2,
        slots: list[str] | None = None,
        isolate: bool = False,
    ) -> None:
        super().__init__()
        if width < 1 or layers < 1:
            raise ValueError(f"host MLP: width and layers must be positive, got {width}, {layers}")
        widths = [math.prod(input_shape)] + [width] * layers
        self.layers = nn.ModuleList(nn.Linear(c, d) for c, d in pairwise(widths))
        slot_widths = {f"layer{i + 1}": width for i in range(layers)}
        self.slots = Slots(list(slot_widths) if slots is None else slots, slot_widths, layout="vector", isolate=isolate)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:  # [B, …] -> [B, outputs]
        x = x.flatten(1)
        for i, layer in enumerate(self.layers):
            x = self.slots.forward_at(f"layer{i + 1}", F.relu(layer(x)))
        return self.head(x)
