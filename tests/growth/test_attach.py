"""Slots attached to any module by hooks: in networks of torchvision, behind parts of outputs, copied and detached."""

import pickle
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm, weight_norm
from torchvision import models

from esper_lightning.growth.attach import CONTAINER_NAME, attach_at, attach_slots, attached_places, detach_slots
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.nested import copy_module, iter_tensors
from tests.growth.grown import (
    SIMPLE,
    WIDTH,
    Residual,
    TinyHost,
    add_noise,
    assert_untouched,
    generator_of,
    grow,
    grown_network,
    images,
    small_network,
)
from tests.growth.mixing import MIXING


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


# Networks of torchvision.


ExpectedSlot = tuple[Layout, int, bool]
"""Expected layout, width and `on_single_path` of a slot."""


class Architecture(NamedTuple):
    """Network with the sites of its slots in the order of execution."""

    build: Callable[[], nn.Module]
    places: dict[str, ExpectedSlot]
    shape: tuple[int, ...] = (3, 32, 32)
    channels_last: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "resnet18": Architecture(
        lambda: models.resnet18(num_classes=2),
        {
            "layer1": ("image", 64, True),
            "layer2.0.conv1": ("image", 128, False),
            "layer2.0.downsample": ("image", 128, False),
            "layer3": ("image", 256, True),
            "avgpool": ("image", 512, True),
            "fc": ("vector", 2, True),
        },
    ),
    "vision transformer": Architecture(
        lambda: models.VisionTransformer(32, 8, 2, 2, 16, 32, dropout=0.1, num_classes=2),
        {
            # All data passes through the first, but later layers reshape patches by the batch size of the input.
            "conv_proj": ("image", 16, False),
            "encoder.layers.encoder_layer_0.self_attention": ("sequence", 16, False),
            "encoder.layers.encoder_layer_0.mlp": ("sequence", 16, False),
            "encoder.layers.encoder_layer_0": ("sequence", 16, True),
            "encoder.ln": ("sequence", 16, True),
            "heads": ("vector", 2, True),
        },
    ),
    "swin": Architecture(
        lambda: models.SwinTransformer([2, 2], 8, [1, 1], [1, 2], [2, 2], dropout=0.1, num_classes=2),
        {
            "features.0": ("image", 8, True),
            "features.1.0.attn": ("image", 8, False),
            "features.1": ("image", 8, True),
            "features.2.reduction": ("image", 16, True),
            "features.3.0.mlp": ("image", 16, False),
            "norm": ("image", 16, True),
            "head": ("vector", 2, True),
        },
        shape=(3, 16, 24),
        channels_last=True,
    ),
}

every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def network_of(name: str) -> nn.Module:
    """Return the architecture with updated batch statistics and a head that is not zero."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = ARCHITECTURES[name].build()
        add_noise(network, scale=0.05)
        network(inputs_for(name, 8))
    return network


def inputs_for(name: str, samples: int, seed: int = 3) -> Tensor:
    return torch.randn(samples, *ARCHITECTURES[name].shape, generator=generator_of(seed))


def attached(name: str) -> nn.Module:
    network = network_of(name)
    attach(network, name)
    return network


def attach(network: nn.Module, name: str, backwards: bool = False) -> dict[str, SeedSlot]:
    """Attach slots at all sites of the architecture."""
    places = list(ARCHITECTURES[name].places)[:: -1 if backwards else 1]
    images = [place for place, (layout, *_) in ARCHITECTURES[name].places.items() if layout == "image"]
    last = images if ARCHITECTURES[name].channels_last else []
    return attach_slots(network, places, inputs_for(name, 2), channels_last=last)


@pytest.mark.parametrize(
    ("place", "layer", "told"),
    [("3", nn.Conv1d(3, 8, 3), True), ("0", weight_norm(nn.Conv1d(3, 8, 3)), True), ("4", nn.Conv1d(3, 8, 3), False)],
)
def test_a_sequence_whose_channels_come_first_is_told_of(
    place: str, layer: nn.Module, told: bool, recwarn: pytest.WarningsRecorder
) -> None:
    network = nn.Sequential(
        layer, nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), Calls(nn.Linear(8, 5), lambda read, x: read(x.mT))
    )

    attach_slots(network, [place], torch.randn(2, 3, 8))

    said = [str(warning.message) for warning in recwarn if "seems to be [B, C, T]" in str(warning.message)]
    assert len(said) == told


@pytest.mark.parametrize("place", ["encoder", "head"])
def test_a_slot_stands_behind_an_encoder_that_leaves_padding_out(place: str) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:  # [B, T, C] -> [B, T, 2]
            mask = torch.zeros(x.shape[:2], dtype=torch.bool)
            mask[:, -1] = True
            return self.head(self.encoder(x, src_key_padding_mask=mask))

    attach_slots(Padded(), [place], torch.randn(2, 4, WIDTH))


def test_layers_tell_where_the_channels_of_an_image_are() -> None:
    swin = models.SwinTransformer([2, 2], 8, [1, 1], [1, 2], [2, 2], num_classes=2)
    convnext = models.ConvNeXt([models.convnext.CNBlockConfig(8, None, 2)], num_classes=2)
    places = {"features.0": 8, "features.1": 8, "features.2": 16, "features.3.0.mlp": 16, "norm": 16}

    assert {
        name: slot.width for name, slot in attach_slots(swin, [*places], torch.randn(2, 3, 28, 36)).items()
    } == places
    names = ["features.0", "features.1"]
    assert [slot.width for slot in attach_slots(convnext, names, torch.randn(2, 3, 36, 44)).values()] == [8, 8]


def same_state(network: nn.Module, other: dict[str, Any]) -> bool:
    """Return True if the weights and statistics of a network, without its slots, are those of a state dict."""
    own = {name: value for name, value in network.state_dict().items() if not name.startswith(CONTAINER_NAME)}
    return list(own) == list(other) and all(torch.equal(own[key], other[key]) for key in own)


def one_step(network: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Return outputs and gradients of a pass with dropout from a fixed RNG seed."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        outputs = network(x)
        outputs.square().sum().backward()
    return outputs, [parameter.grad for parameter in network.parameters()]


@every_architecture
def test_places_have_their_layout_width_and_way_in_the_order_of_the_data(name: str) -> None:
    network, places = network_of(name), ARCHITECTURES[name].places
    slots = attach(network, name, backwards=True)
    assert {place: (slot.layout, slot.width, slot.on_single_path) for place, slot in slots.items()} == places
    assert list(slots) == list(places) == list(slots_of(network))


@pytest.mark.thinned(5)
@every_architecture
@pytest.mark.parametrize("training", [False, True], ids=["evaluating", "training"])
def test_empty_slots_change_neither_outputs_nor_gradients_nor_state(name: str, training: bool) -> None:
    plain, with_slots = network_of(name).train(training), attached(name).train(training)
    x = inputs_for(name, 4)
    outputs, gradients = one_step(plain, x)
    outputs_with_slots, gradients_with_slots = one_step(with_slots, x)
    assert torch.equal(outputs_with_slots, outputs)
    for ours, theirs in zip(gradients_with_slots, gradients, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    assert same_state(with_slots, plain.state_dict())  # batch statistics have changed in both


@every_architecture
def test_a_network_that_is_not_ours_learns_with_seeds_at_all_sites(name: str) -> None:
    network, x = attached(name), inputs_for(name, 8)
    growing = GrowingNetwork(network, torch.optim.Adam(network.parameters(), lr=2e-3), horizon=2)
    for place, slot in growing.slots.items():
        growing.germinate(place, SIMPLE[slot.layout])
    before = deepcopy([slot.seed.state_dict() for slot in growing.slots.values()])
    (network.train()(x) - 1.0).square().mean().backward()
    growing.optimizer.step()
    for slot, weights in zip(growing.slots.values(), before, strict=True):
        assert any(not torch.equal(value, weights[key]) for key, value in slot.seed.state_dict().items()), slot.name


@every_architecture
def test_detaching_takes_everything_away_that_grew(name: str) -> None:
    plain, network = network_of(name).eval(), attached(name)
    for slot in slots_of(network).values():
        grow(slot, Stage.FOSSILIZED, SIMPLE[slot.layout])
    x = inputs_for(name, 4)
    assert not torch.allclose(network.eval()(x), plain(x))
    assert len(network.state_dict()) > len(plain.state_dict())

    detach_slots(network)

    assert same_state(network, plain.state_dict())
    assert [module for module, _ in network.named_modules()] == [module for module, _ in plain.named_modules()]
    assert torch.equal(network(x), plain(x))


# Outputs of several parts.


WIDTH = 6


class Encoded(NamedTuple):
    features: Tensor
    mask: Tensor


class ModelOutput(OrderedDict):
    """Mapping whose keys are also attributes, like the outputs of many transformers."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda h, ids: (h, ids), lambda out: out[0]),
    "dict": (lambda h, ids: {"ids": ids, "h": h}, lambda out: out["h"]),
    "attributes": (lambda h, ids: ModelOutput(ids=ids, h=h), lambda out: out.h),
    "nested": (lambda h, ids: (ids, {"a": [ids, Encoded(h, ids)]}), lambda out: out[1]["a"][1][0]),
}


@pytest.mark.parametrize(("pack", "read"), CONTAINERS.values(), ids=list(CONTAINERS))
def test_a_seed_grows_behind_a_part_of_an_output(
    pack: Callable[[Tensor, Tensor], Any], read: Callable[[Any], Tensor]
) -> None:
    encoder = Calls(nn.Linear(5, WIDTH), lambda layer, x: pack(torch.tanh(layer(x)), torch.arange(len(x))))
    network, x = nn.Sequential(encoder), torch.randn(4, 5, generator=generator_of())
    plain = network(x)
    slot = attach_slots(network, ["0"], x)["0"]
    assert (slot.layout, slot.width) == ("vector", WIDTH)
    assert torch.equal(read(network(x)), read(plain))
    grow(slot, Stage.FOSSILIZED, "lora")

    grown = network(x)

    assert torch.equal(read(grown), slot.seed(read(plain))) and not torch.allclose(read(grown), read(plain))
    assert type(grown) is type(plain)
    others, grown_others = ([part for part in iter_tensors(out) if part is not read(out)] for out in (plain, grown))
    assert others and all(map(torch.equal, grown_others, others))


def test_a_seed_grows_on_the_output_of_an_lstm_and_not_on_its_states() -> None:
    network, x = nn.Sequential(nn.LSTM(5, WIDTH, batch_first=True)), torch.randn(4, 7, 5, generator=generator_of())
    outputs, states = network(x)
    slot = attach_slots(network, ["0"], x)["0"]
    assert (slot.layout, slot.width) == ("sequence", WIDTH)
    grow(slot, Stage.FOSSILIZED, "lora")
    grown, grown_states = network(x)
    torch.testing.assert_close(grown, slot.seed(outputs))
    assert not torch.allclose(grown, outputs)
    assert all(map(torch.equal, grown_states, states))


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_a_network_with_a_computed_weight_or_a_stored_activation_is_copied(norm: Callable[..., nn.Module]) -> None:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = [super().forward(x)]
            return self.last[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has newer forms of these norms, and people have these
        network = nn.Sequential(norm(nn.Linear(3, 3)), Keeps(3, 3)).eval()
    x = torch.randn(2, 3)
    expected = network(x)

    copied = copy_module(network)

    assert torch.equal(copied(x), expected)
    copied(x).sum().backward()
    assert all(p.grad is not None for p in copied.parameters()) and all(p.grad is None for p in network.parameters())


def test_a_module_that_holds_a_lock_is_refused_in_one_line() -> None:
    network = nn.Linear(2, 2)
    network.lock = threading.Lock()  # type: ignore[assignment]

    with pytest.raises(ValueError, match=r"Linear cannot be copied: cannot pickle '_thread\.lock' object"):
        copy_module(network)
