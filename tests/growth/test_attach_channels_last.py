"""Slots at features in channels-last layout [B, H, W, C]."""

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.stages import Stage
from tests.growth.attached import WIDTH, assert_untouched, images, small_network
from tests.growth.grown import generator_of, grow


class LooksLast(nn.Module):
    """Network with channels in the last axis between a convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.last, self.read = nn.Conv2d(3, WIDTH, 3), nn.Identity(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:  # [B, 3, H, W] -> [B, H - 2, W - 2, 2]
        return self.read(self.last(torch.tanh(self.see(x)).permute(0, 2, 3, 1)))


def test_a_seed_sees_channels_that_come_last_as_a_seed_of_images_does() -> None:
    network, x = LooksLast(), torch.randn(2, 3, 7, 9, generator=generator_of())
    slots = attach_slots(network, ["last", "see"], x, channels_last=["last"])
    assert [(slot.layout, slot.width) for slot in slots.values()] == [("image", WIDTH)] * 2
    grow(slots["last"], Stage.FOSSILIZED, "conv_heavy")
    feature = torch.tanh(nn.functional.conv2d(x, network.see.weight, network.see.bias))
    expected = torch.einsum("bchw,oc->bhwo", slots["last"].seed(feature), network.read.weight) + network.read.bias
    torch.testing.assert_close(network(x), expected)


@pytest.mark.parametrize(
    ("names", "channels_last", "message"),
    [
        (["last"], ["lost"], r"channels_last names 'lost', which gets no slot; did you mean 'last'\?"),
        (["last"], ["see"], "channels_last names 'see', which gets no slot; there are: last"),
    ],
)
def test_channels_that_come_last_where_no_slot_is_are_refused(
    names: list[str], channels_last: list[str], message: str
) -> None:
    network = LooksLast()
    with pytest.raises(ValueError, match=f"^{message}$"):
        attach_slots(network, names, torch.randn(2, 3, 7, 9), channels_last=channels_last)
    assert_untouched(network)


def test_only_images_may_have_their_channels_last() -> None:
    network = small_network()
    with pytest.raises(
        ValueError, match=r"slot '5': .* \(4, 12\) is none of .* or, with channels_last, \[B, H, W, C\]"
    ):
        attach_slots(network, ["5"], images(), channels_last=["5"])
    assert_untouched(network)
