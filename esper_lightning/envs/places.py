"""Common action space of the hosts of several tasks, so that one policy can grow all of them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.envs.actions import ActionSpace
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.slot import ABSENT, SeedSlot


class Common(NamedTuple):
    """Slots and blueprints in the common action space of several tasks."""

    places: list[str]
    """Names of the slots; every host gets this many, under these names."""
    blueprints: list[str]
    """Names of the blueprints that can grow on the hosts of at least one task."""


def share(offers: Sequence[tuple[ActionSpace, Tensor]]) -> Common:
    """Return the union of the tasks' action spaces: the largest number of slots, and every blueprint."""
    most = max(len(space.slot) for space, _ in offers)
    blueprints = dict.fromkeys(name for space, _ in offers for name in space.blueprint)
    return Common([f"place{i + 1}" for i in range(most)], list(blueprints))


def give_places(network: nn.Module, places: Sequence[str], device: torch.device) -> nn.Module:
    """Rename the slots of a host to `places`, in order; missing ones are added as slots in which nothing can grow."""
    slots = list(slots_of(network).values())
    assert len(slots) <= len(places), "as many places as the host with the most slots has"
    for slot, place in zip(slots, places, strict=False):
        slot.name = place
    missing = places[len(slots) :]
    with device:
        network.absent_places = AbsentPlaces(SeedSlot(place, ABSENT, 1, isolate=False) for place in missing)
    return network


class AbsentPlaces(nn.ModuleList):
    """Padding slots, through which no feature passes."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x unchanged, because an `nn.Sequential` host runs this module as its last layer."""
        return x
