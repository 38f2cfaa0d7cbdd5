"""Slots with the same name."""

import pytest
from torch import nn

from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.hosts import CNN


def test_duplicate_slots_are_caught_everywhere_with_one_message() -> None:
    """F16: a host with a slot requested twice and a network with two slots of one name raise the same error."""
    message = "^slot 'block1' is named twice; name each slot once$"
    with pytest.raises(ValueError, match=message):
        CNN((1, 8, 8), 10, slots=["block1", "block2", "block1"])
    network = nn.Sequential(SeedSlot("block1", "image", 4), SeedSlot("block1", "image", 4))
    with pytest.raises(ValueError, match=message):
        slots_of(network)
