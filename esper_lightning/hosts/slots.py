"""The slots of a host, by name."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from esper_lightning.growth.lifecycle import check_slot_names
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.serialization.excerpt import excerpt

MAX_WIDTH, MAX_DEPTH = 2**20, 1000
"""Largest width of a feature and number of layers in a host. Layers take time to create even without memory."""


def check_sizes(host: str, *, maximum: int, **sizes: int) -> None:
    """Raise ValueError if a size, given by its name, is larger than `maximum`."""
    for name, size in sizes.items():
        if size > maximum:
            raise ValueError(f"host {host}: {name} must be at most {maximum}, got {excerpt(size)}")


class Slots(nn.ModuleDict):
    """The slots of a host, at a subset of the positions where it allows them.

    Args:
        slot_names: Names of the slots to create, in any order.
        slot_widths: Names of all possible slots with the width C of the feature there, in forward order.
        layout: Layout of the features.
        isolate: See SeedSlot.
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
