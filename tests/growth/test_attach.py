"""Slots attached to any module by hooks: their features, unchanged outputs, and detaching."""

import io
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import attach_at, attach_slots, attached_places, detach_slots
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from tests.growth.attached import WIDTH, Residual, grown_network, images, small_network
from tests.growth.grown import grow


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


def through_a_file(network: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deep copy": deepcopy,
    "pickle": lambda network: pickle.loads(pickle.dumps(network)),
    "torch.save": through_a_file,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=list(COPIES))
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
