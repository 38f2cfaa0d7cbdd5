"""Errors where no slot can be attached; the network is then unchanged."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import attach_slots, attached_places, detach_slots
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from tests.growth.attached import WIDTH, Residual, assert_untouched, images, small_network
from tests.growth.grown import TinyHost, grow
from tests.growth.mixing import MIXING


class Calls(nn.Module):
    """Network that calls a given function with its only layer."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.layer, x)


class Argmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


@pytest.mark.parametrize(
    ("make", "names", "example", "message"),
    [
        (small_network, ["head"], images(), "the network has no module 'head'; there are: 0, 1, 2, 3, 4, 5, 6"),
        (Residual, ["stem", "body.00"], torch.randn(3, 5), "no module 'body.00'; did you mean 'body.0'?"),
        (small_network, ["2", "2"], images(), "slot '2' is named twice; name each slot once"),
        (small_network, [], images(), "name at least one module, as a list of names; got []"),
        (small_network, "0", images(), "name at least one module, as a list of names; got '0'"),
        (Residual, ["stem", "never"], torch.randn(3, 5), "module 'never' does not run when the network does; name one"),
        (lambda: nn.Sequential(Argmax()), ["0"], torch.randn(3, 5), "gives Tensor, no floating-point tensor"),
        (lambda: nn.Sequential(nn.Identity()), ["0"], {"input": "text"}, "gives str, no floating-point tensor"),
        (lambda: nn.Sequential(nn.Conv3d(3, 4, 1)), ["0"], torch.randn(2, 3, 4, 4, 4), "(2, 4, 4, 4, 4) is none of"),
        (lambda: nn.Sequential(nn.Flatten(0)), ["0"], torch.randn(2, 3), "(6,) is none of [B, C, H, W], [B, T, C]"),
        (small_network, ["0"], images(1), "the example has one sample only; give at least two"),
        (
            lambda: Calls(nn.Conv2d(3, 3, 3), lambda layer, x: layer(layer(x)).mean((2, 3))),
            ["layer"],
            images(),
            "module 'layer' runs again, on a feature of another shape",
        ),
    ],
)
def test_where_no_slot_can_be_the_reason_is_told_and_nothing_is_attached(
    make: Callable[[], nn.Module], names: list[str], example: Any, message: str
) -> None:
    network = make()
    with pytest.raises(ValueError, match=re.escape(message)):
        attach_slots(network, names, example)
    assert_untouched(network)
    assert all(module.training for module in network.modules())


def test_a_feature_whose_first_axis_is_not_the_batch_is_refused() -> None:
    network = nn.Sequential(nn.LSTM(5, WIDTH))
    network.forward = lambda x: network[0](x.transpose(0, 1))  # torch's default has time first
    with pytest.raises(ValueError, match=re.escape(f"slot '0': the first axis of the feature (4, 3, {WIDTH}) is not")):
        attach_slots(network, ["0"], torch.randn(3, 4, 5))
    assert_untouched(network)


@pytest.mark.parametrize("kind", ["experts with a capacity", "softmax over the batch", "dropout in evaluation"])
def test_a_slot_behind_rows_that_see_each_other_is_refused_for_this_reason(kind: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 16), MIXING[kind](), nn.Linear(16, 2))

    with pytest.raises(ValueError, match=r"slot '1': rows of the feature \(5, 16\) change with other rows"):
        attach_slots(network, ["1"], torch.randn(5, 16))


class LooksLast(nn.Module):
    """Network with channels in the last axis between a convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.last, self.read = nn.Conv2d(3, WIDTH, 3), nn.Identity(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:  # [B, 3, H, W] -> [B, H - 2, W - 2, 2]
        return self.read(self.last(torch.tanh(self.see(x)).permute(0, 2, 3, 1)))


def test_a_seed_sees_channels_that_come_last_as_a_seed_of_images_does() -> None:
    network, x = LooksLast(), torch.randn(2, 3, 7, 9)
    slots = attach_slots(network, ["last", "see"], x, channels_last=["last"])
    assert [(slot.layout, slot.width) for slot in slots.values()] == [("image", WIDTH)] * 2
    grow(slots["last"], Stage.FOSSILIZED, "conv_heavy")
    feature = torch.tanh(nn.functional.conv2d(x, network.see.weight, network.see.bias))
    expected = torch.einsum("bchw,oc->bhwo", slots["last"].seed(feature), network.read.weight) + network.read.bias
    torch.testing.assert_close(network(x), expected)


class ChecksItsBatch(nn.Module):
    """Network that raises an error if the batch size changes between its layers, as attention does."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        if len(hidden) != len(x):
            raise self.error("the batch has changed")
        return self.head(hidden)


@pytest.mark.parametrize("error", [RuntimeError, ValueError, IndexError, KeyError, AssertionError])
def test_a_network_that_checks_its_batch_is_bypassed_there(error: type[Exception]) -> None:
    slots = attach_slots(ChecksItsBatch(error), ["stem", "head"], torch.randn(3, 5))
    assert [slot.on_single_path for slot in slots.values()] == [False, True]


def test_a_network_that_is_compiled_already_gets_no_slots() -> None:
    in_place = small_network()
    in_place.compile(backend="eager")
    for network in (torch.compile(small_network(), backend="eager"), in_place):
        with pytest.raises(ValueError, match="attach them first, compile then"):
            attach_slots(network, ["2"], images())


def test_what_is_not_attached_cannot_be_detached() -> None:
    for network in (small_network(), TinyHost("vector")):
        with pytest.raises(ValueError, match="the network has no attached slots; there is nothing to detach"):
            detach_slots(network)
    network = small_network()
    attach_slots(network, ["0", "2"], images())
    with pytest.raises(ValueError, match="unknown slot '4'; there are: 0, 2"):
        detach_slots(network, ["0", "4"])
    assert [place["slot"] for place in attached_places(network)] == ["0", "2"]


def test_a_slot_that_the_network_already_has_is_refused() -> None:
    network = small_network()
    attach_slots(network, ["2"], images())
    with pytest.raises(ValueError, match=r"^slot '2' exists already; leave it out$"):
        attach_slots(network, ["0", "2"], images())
    assert list(slots_of(network)) == ["2"]
