"""Export of grown networks by torch.export, for batches of any size."""

from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from esper_lightning.blueprints import blueprint_names
from esper_lightning.growth.alpha import DEFAULT_RAMP, Ramp
from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.blend import BlendStyle
from esper_lightning.growth.fold import fold
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import GPT, MLP
from tests.growth.grown import CPU, STYLES, generator_of, grow, slot_named, small_batch, small_cnn
from tests.tiers import rest_is_slow

HALF = Ramp(0.0, 0.5, 1, "linear")


def cnn() -> nn.Module:
    network = small_cnn(["block1", "block2.pool", "block3.pool"])
    network(small_batch()[0])  # moves BatchNorm's statistics
    return network


def gpt() -> nn.Module:
    return GPT((6,), 11, width=8, blocks=3, heads=2, context=8, slots=["layer1", "layer2", "layer3"])


def mlp() -> nn.Module:
    return MLP((5,), 3, width=6, layers=3)


def resnet() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = models.resnet18(num_classes=3)
    attach_slots(network, ["layer1", "layer2.0.conv1", "fc"], images(2))
    return network


def digits(samples: int) -> Tensor:
    return small_batch(samples)[0]


def tokens(samples: int) -> Tensor:
    return torch.randint(11, (samples, 6), generator=generator_of(samples))


def vectors(samples: int) -> Tensor:
    return torch.randn(samples, 5, generator=generator_of(samples))


def images(samples: int) -> Tensor:
    return torch.randn(samples, 3, 32, 32, generator=generator_of(samples))


SIMPLE = {"image": "conv_light", "sequence": "lora", "vector": "lora"}


def grown(network: nn.Module) -> nn.Module:
    """Return a network with a fossilized seed of each style, the first two at alpha 1/2."""
    for slot, style, ramp in zip(slots_of(network).values(), STYLES, [HALF, HALF, DEFAULT_RAMP], strict=True):
        grow(slot, Stage.FOSSILIZED, SIMPLE[slot.layout], ramp, style=style)
    return network.eval()


def exported(network: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))


@pytest.mark.parametrize(
    ("build", "inputs"),
    rest_is_slow([(cnn, digits), (gpt, tokens), (mlp, vectors), (resnet, images)], lambda case: case[0] is not cnn),
)
def test_an_exported_network_says_the_same_on_batches_of_any_size(
    build: Callable[[], nn.Module], inputs: Callable[[int], Tensor], tmp_path: Path
) -> None:
    network = grown(build())
    program = exported(network, inputs(3))
    torch.export.save(program, tmp_path / "grown.pt2")
    loaded = torch.export.load(tmp_path / "grown.pt2")
    for samples in (1, 3, 8):
        expected = network(inputs(samples))
        for each in (program, loaded):
            torch.testing.assert_close(each.module()(inputs(samples)), expected, rtol=1e-5, atol=1e-6)


def test_what_is_exported_is_the_grown_network_and_no_more() -> None:
    network = grown(cnn())
    program = exported(network, digits(2))
    assert set(program.state_dict) == set(network.state_dict())
    assert not torch.allclose(program.module()(digits(4)), cnn().eval()(digits(4)))


IMAGE_SEEDS = list(zip(blueprint_names("image", CPU), cycle(STYLES), strict=False))
"""Each of them in a style, and each style with some of them."""


@pytest.mark.parametrize(
    ("blueprint", "style"),
    rest_is_slow(product(blueprint_names("image", CPU), STYLES), lambda case: case in IMAGE_SEEDS),
)
def test_every_image_seed_is_exported_in_every_style(blueprint: str, style: BlendStyle) -> None:
    network = small_cnn(["block1"]).eval()
    grow(slot_named(network, "block1"), Stage.FOSSILIZED, blueprint, HALF, style=style)
    program = exported(network, digits(2))
    torch.testing.assert_close(program.module()(digits(5)), network(digits(5)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("blueprint", blueprint_names("sequence", CPU))
def test_every_sequence_seed_is_exported_for_sequences_of_any_length(blueprint: str) -> None:
    network = GPT((6,), 11, width=8, blocks=1, heads=2, context=8, slots=["layer1"]).eval()
    grow(slot_named(network, "layer1"), Stage.FOSSILIZED, blueprint, HALF, style="gate")
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=8)}
    program = torch.export.export(network, (tokens(3),), dynamic_shapes=(dims,))
    for x in (tokens(5), tokens(2)[:, :4], tokens(4)[:, :1].expand(-1, 8)):
        torch.testing.assert_close(program.module()(x), network(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("blueprint", blueprint_names("vector", CPU))
def test_every_vector_seed_is_exported(blueprint: str) -> None:
    network = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    grow(attach_slots(network, ["1"], vectors(2))["1"], Stage.FOSSILIZED, blueprint, HALF, style="multiply")
    program = exported(network, vectors(2))
    torch.testing.assert_close(program.module()(vectors(5)), network(vectors(5)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "stage",
    rest_is_slow([Stage.DORMANT, Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY], {Stage.TRAINING, Stage.BLENDING}),
)
def test_a_network_may_be_exported_in_the_middle_of_growth(stage: Stage) -> None:
    network = small_cnn(["block1"]).eval()
    if stage is not Stage.DORMANT:
        grow(slot_named(network, "block1"), stage, "conv_light", HALF)
    program = exported(network, digits(2))
    torch.testing.assert_close(program.module()(digits(5)), network(digits(5)), rtol=1e-5, atol=1e-6)


def test_a_folded_network_is_exported() -> None:
    network = small_cnn(["block1", "block2"]).eval()
    grow(slot_named(network, "block1"), Stage.FOSSILIZED, "conv_light")
    grow(slot_named(network, "block2"), Stage.FOSSILIZED, "conv_small")
    before = network(digits(5))
    assert [folding.target_layer for folding in fold(network, digits(4))] == ["block1", "block2"]
    program = exported(network, digits(2))
    torch.testing.assert_close(program.module()(digits(5)), network(digits(5)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(program.module()(digits(5)), before, rtol=1e-4, atol=1e-5)
