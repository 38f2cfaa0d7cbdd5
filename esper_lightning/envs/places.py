"""Places: slots that hosts of several tasks have in common, so that one policy can grow them all."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.envs.actions import ActionSpace
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.slot import ABSENT, SeedSlot


class Common(NamedTuple):
    """What hosts of several tasks share."""

    places: list[str]
    """Names of the slots, wherever they are."""
    blueprints: list[str]
    """That grow on the hosts of one task at least."""


def share(offers: Sequence[tuple[ActionSpace, Tensor]]) -> Common:
    """What hosts have in common, by the choices there are on each by itself: the most slots, and every blueprint."""
    most = max(len(space.slot) for space, _ in offers)
    blueprints = dict.fromkeys(name for space, _ in offers for name in space.blueprint)
    return Common([f"place{i + 1}" for i in range(most)], list(blueprints))


def give_places(network: nn.Module, places: Sequence[str], device: torch.device) -> nn.Module:
    """Renames the slots of `network`, in order; for a place too many there is a slot in which nothing can grow."""
    slots = list(slots_of(network).values())
    assert len(slots) <= len(places), "as many places as the host with the most slots has"
    for slot, place in zip(slots, places, strict=False):
        slot.name = place
    missing = places[len(slots) :]
    with device:
        network.absent_places = AbsentPlaces(SeedSlot(place, ABSENT, 1, isolate=False) for place in missing)
    return network


class AbsentPlaces(nn.ModuleList):
    """Slots that no feature passes through."""

    def forward(self, x: Tensor) -> Tensor:
        """The same: a host that is an `nn.Sequential` takes it for its last layer."""
        return x
