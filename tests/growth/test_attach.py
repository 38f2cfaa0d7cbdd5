"""Slots attached to any module by hooks: their features, unchanged outputs, and detaching."""

import pickle
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import attach_at, attach_slots, attached_places, detach_slots
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from tests.growth.grown import WIDTH, Residual, TinyHost, assert_untouched, grow, grown_network, images, small_network
from tests.growth.mixing import MIXING


def test_names_may_come_in_any_order_and_slots_come_in_the_datas() -> None:
    slots = attach_slots(small_network(), ["6", "0", "3"], images())
    assert list(slots) == ["0", "3", "6"]
    assert [(slot.layout, slot.width) for slot in slots.values()] == [("image", WIDTH), ("image", WIDTH), ("vector", 2)]


def test_a_slot_sees_what_its_module_gives_and_the_next_module_sees_the_slot() -> None:
    network, x = small_network().eval(), images()
    behind_relu, behind_linear = network[:3](x), network[3:6](network[:3](x))
    slots = attach_slots(network, ["2", "5"], x)
    seen: dict[str, Tensor] = {}
    for name, slot in slots.items():
        slot.register_forward_hook(lambda _, inputs, __, name=name: seen.update({name: inputs[0]}))
    network(x)
    assert torch.equal(seen["2"], behind_relu)
    assert torch.equal(seen["5"], behind_linear)

    grow(slots["2"], Stage.FOSSILIZED, "conv_light")
    outputs = network(x)
    plain = small_network().eval()
    torch.testing.assert_close(outputs, plain[3:](slots["2"].seed(plain[:3](x))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_slot_has_the_precision_of_its_feature(dtype: torch.dtype) -> None:
    network = small_network().to(dtype)
    slot = attach_slots(network, ["0"], images().to(dtype))["0"]
    grow(slot, Stage.FOSSILIZED, "conv_light")
    assert {slot.alpha.dtype, *(p.dtype for p in slot.seed.parameters())} == {dtype}
    assert network(images().to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    "example", [(images(),), {"x": images()}, {"x": images(), "scale": 2.0}, (images(), 2.0)], ids=["", "x", "xs", "ps"]
)
def test_an_example_may_be_positional_or_keyword_arguments(example: tuple[Any, ...] | dict[str, Any]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_network()

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return scale * self.inner(x)

    assert attach_slots(Scaled(), ["inner.0"], example)["inner.0"].width == WIDTH


def test_attaching_again_adds_slots_and_leaves_what_grew() -> None:
    network = small_network().eval()
    first = attach_slots(network, ["2"], images())["2"]
    grow(first, Stage.FOSSILIZED, "conv_light")
    before = network(images())
    both = attach_slots(network, ["5"], images())
    with pytest.raises(ValueError, match=r"^slot '2' exists already; leave it out$"):
        attach_slots(network, ["0", "2"], images())
    assert list(both) == list(slots_of(network)) == ["2", "5"]
    assert both["2"] is first
    assert first.stage is Stage.FOSSILIZED
    assert torch.equal(network(images()), before)
    detach_slots(network)
    assert list(network.state_dict()) == list(small_network().state_dict())


@pytest.mark.parametrize(
    ("place", "trunk"), [("stem", True), ("body", False), ("body.0", False), ("aside", False), ("head", True)]
)
def test_the_trunk_is_where_all_data_passes(place: str, trunk: bool) -> None:
    assert attach_slots(Residual(), [place], torch.randn(3, 5))[place].on_single_path is trunk


@pytest.mark.parametrize("copied", [deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_a_copy_grows_in_its_own_slots(copied: Callable[[nn.Module], nn.Module]) -> None:
    network = grown_network()
    before = network(images())
    twin = copied(network)
    assert torch.equal(twin(images()), before)
    slots_of(twin)["2"].empty()
    changed = twin(images())
    assert not torch.allclose(changed, before)
    assert torch.equal(network(images()), before)
    detach_slots(twin)
    assert torch.equal(twin(images()), small_network().eval()(images()))
    assert torch.equal(network(images()), before)
    assert [place["slot"] for place in attached_places(network)] == ["2", "5"]


def test_where_slots_are_is_enough_to_attach_them_again() -> None:
    network, bare = grown_network(), small_network().eval()
    attach_at(bare, attached_places(network))
    assert attached_places(bare) == attached_places(network)
    assert list(slots_of(bare)) == list(slots_of(network))
    assert torch.equal(bare(images()), small_network().eval()(images()))
    assert attached_places(small_network()) == []
    beside, again = Residual(), Residual()
    attach_slots(beside, ["stem", "body.0"], torch.randn(3, 5))  # a shortcut bypasses the second
    attach_at(again, attached_places(beside))
    assert {name: slot.on_single_path for name, slot in slots_of(again).items()} == {"stem": True, "body.0": False}


# What cannot be attached.


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
        (
            lambda: Calls(nn.LSTM(5, WIDTH), lambda layer, x: layer(x.transpose(0, 1))),  # torch's default: time first
            ["layer"],
            torch.randn(3, 4, 5),
            f"slot 'layer': the first axis of the feature (4, 3, {WIDTH}) is not",
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


@pytest.mark.parametrize("error", [RuntimeError, ValueError, IndexError, KeyError, AssertionError])
def test_a_network_that_checks_its_batch_is_bypassed_there(error: type[Exception]) -> None:
    def forward(x: Tensor) -> Tensor:
        hidden = network[0](x)
        if len(hidden) != len(x):
            raise error("the batch has changed")
        return network[1](hidden)

    network = nn.Sequential(nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3))
    network.forward = forward
    slots = attach_slots(network, ["0", "1"], torch.randn(3, 5))
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
