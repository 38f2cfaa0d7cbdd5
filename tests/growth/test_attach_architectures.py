"""Slots in networks of torchvision, which were not written for growth."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from esper_lightning.growth.attach import CONTAINER_NAME, attach_slots, detach_slots
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import SIMPLE, add_noise, generator_of, grow

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
