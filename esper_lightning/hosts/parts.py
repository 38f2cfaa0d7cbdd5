"""Parts that the hosts share: slots by name, and blocks whose activations are computed again instead of stored."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
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
        isolate: Detach the seeds' inputs until they are fossilized (`SeedSlot.detach_input`). None: only for images.
    """

    def __init__(
        self, slot_names: Sequence[str], slot_widths: Mapping[str, int], *, layout: Layout, isolate: bool | None
    ) -> None:
        check_slot_names(slot_names, slot_widths)
        super().__init__(
            {
                _module_key(name): SeedSlot(name, layout, slot_widths[name], detach_input=isolate)
                for name in slot_widths
                if name in slot_names
            }
        )

    def forward_at(self, name: str, x: Tensor) -> Tensor:  # same shape in and out
        """Return the output of the named slot for the feature `x`, or `x` itself if there is no such slot."""
        key = _module_key(name)
        return self[key](x) if key in self else x


def _module_key(name: str) -> str:
    # nn.ModuleDict allows no dots in keys; `SeedSlot.name` keeps the dot.
    return name.replace(".", "_")


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
