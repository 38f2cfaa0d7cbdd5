"""The slots of a host, by the names of their places."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from esper_lightning.growth.network import check_slot_names
from esper_lightning.growth.slot import Layout, SeedSlot


class Slots(nn.ModuleDict):
    """Slots at some of a host's places; elsewhere features pass unchanged.

    Args:
        wanted: Names of the places that get a slot, in any order.
        places: Every place of the host and the width C of the feature there, in the order of the data's way.
        layout: Shape of the features.
        isolate: See SeedSlot.
    """

    def __init__(self, wanted: Sequence[str], places: Mapping[str, int], layout: Layout, isolate: bool | None) -> None:
        check_slot_names(wanted, places)
        super().__init__(
            {_key(name): SeedSlot(name, layout, places[name], isolate) for name in places if name in wanted}
        )

    def at(self, place: str, x: Tensor) -> Tensor:  # same shape in and out
        """The feature `x` behind the slot at `place`, if there is one."""
        key = _key(place)
        return self[key](x) if key in self else x


def _key(place: str) -> str:
    # nn.ModuleDict allows no dots in keys; the slot's own name keeps it.
    return place.replace(".", "_")
