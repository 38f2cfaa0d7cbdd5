"""Training, growth and saving of folded networks, and folding of real hosts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models

from esper_lightning.blueprints import Residual, registry
from esper_lightning.growth.alpha import DEFAULT_RAMP, Ramp
from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.export import load, save
from esper_lightning.growth.fold import FoldResult, affine_map_of, fold
from esper_lightning.growth.lifecycle import count_parameters, germinate, slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import GPT, MLP
from tests.growth.chains import (
    WIDTH,
    chain,
    example,
    fold_and_check,
    fossilize_seed,
    unchanged_by_folding,
)
from tests.growth.grown import LIFE, add_noise, generator_of, grow, slot_named, small_batch, small_cnn


def test_a_folded_slot_may_grow_and_be_folded_again() -> None:
    network, x = chain("image", nn.Tanh(), nn.Tanh()).double(), example("image").double()
    slot = network.slot
    fossilize_seed(slot, "conv_light")
    assert fold_and_check(network, x, 1e-10) == [FoldResult("place", "place", "")]
    size = count_parameters(network)
    for target in (1.0, 0.5):
        fossilize_seed(slot, "conv_small", Ramp(0.0, target, 1, "linear"))
        assert fold_and_check(network, x, 1e-10) == [FoldResult("place", "place", "")]
        assert count_parameters(network) == size
    assert slot.folded.kernel_size == (3, 3)
    fossilize_seed(slot, "conv_light")  # two 3×3 convolutions have a larger receptive field than one
    before = network(x)
    (folding,) = fold_and_check(network, x, 1e-10)
    assert folding == FoldResult("place", None, "no linear layer before or behind the slot can take it")
    assert torch.equal(network(x), before)


def test_seeds_that_follow_each_other_go_into_the_same_layer() -> None:
    network = nn.Sequential(
        nn.Linear(5, WIDTH), *(SeedSlot(name, "vector", WIDTH) for name in "abc"), nn.Tanh(), nn.Linear(WIDTH, 2)
    ).double()
    for slot in slots_of(network).values():
        if slot.name != "b":  # an empty slot does not prevent the fold
            fossilize_seed(slot, "lora")
    assert fold_and_check(network, example("vector").double(), 1e-10) == [
        FoldResult("a", "0", ""),
        FoldResult("c", "0", ""),
    ]
    assert [name for name, _ in network.named_parameters()] == ["0.weight", "0.bias", "5.weight", "5.bias"]


def test_a_layer_that_took_a_seeds_place_takes_the_next_seed_in() -> None:
    network = nn.Sequential(
        nn.Tanh(), SeedSlot("a", "image", 3), SeedSlot("b", "image", 3), nn.Tanh(), nn.Conv2d(3, 2, 1)
    )
    for slot in slots_of(network).values():
        fossilize_seed(slot, "conv_small")
    assert fold_and_check(network, example("image")) == [FoldResult("a", "a", ""), FoldResult("b", "1.folded", "")]


def test_what_was_folded_goes_on_learning() -> None:
    network, x = chain("image", nn.Tanh()), example("image")
    fossilize_seed(network.slot, "conv_light")
    fold(network, x)
    network.train()(x).square().sum().backward()
    assert all(parameter.grad.any() for parameter in network.parameters())
    assert network.slot.folded in list(network.modules())


def test_a_folded_network_is_saved_and_loaded(tmp_path: Path) -> None:
    network, x = small_cnn(["block1", "block2.pool"]), small_batch()[0]
    fossilize_seed(slot_named(network, "block1"), "conv_light")
    fossilize_seed(slot_named(network, "block2.pool"), "conv_small")
    assert all(folding.target_layer for folding in fold_and_check(network, x))
    grow(slot_named(network, "block1"), Stage.BLENDING, "conv_heavy")  # a new seed in a folded slot
    save(network, tmp_path / "grown")
    copy = small_cnn(["block1", "block2.pool"], seed=99)
    load(copy, tmp_path / "grown")
    assert torch.equal(copy.eval()(x), network.eval()(x))
    assert [slot_named(copy, name).folded.kernel_size for name in ("block1", "block2.pool")] == [(3, 3), (1, 1)]


def test_seeds_in_a_users_network_are_folded_saved_and_loaded(tmp_path: Path) -> None:
    def resnet() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3)

    network, x = resnet(), torch.randn(2, 3, 32, 32, generator=generator_of())
    places = ["layer1.0.conv1", "layer1.0.conv2", "layer2", "avgpool", "fc"]
    slots = attach_slots(network, places, x)
    fossilize_seed(slots["layer1.0.conv1"], "conv_small")
    fossilize_seed(slots["layer1.0.conv2"], "conv_small", bias=False)
    fossilize_seed(slots["layer2"], "conv_small")
    fossilize_seed(slots["avgpool"], "conv_heavy")
    fossilize_seed(slots["fc"], "lora")
    into = {folding.slot: folding.target_layer for folding in fold_and_check(network, x)}
    assert into == {
        "layer1.0.conv1": "layer1.0.conv1",  # into a new layer in the slot: the convolution of that name has no bias
        "layer1.0.conv2": "layer1.0.conv2",  # into the convolution
        "layer2": "layer2",
        "avgpool": None,
        "fc": "fc",
    }
    kernels = {name: slot.folded and slot.folded.kernel_size for name, slot in slots.items()}
    assert kernels == dict.fromkeys(places) | {"layer1.0.conv1": (1, 1), "layer2": (1, 1)}
    save(network, tmp_path / "grown")
    copy = resnet()
    load(copy, tmp_path / "grown")
    assert torch.equal(copy.eval()(x), network.eval()(x))


def test_our_cnn_takes_seeds_in_where_its_layers_touch_them() -> None:
    places = ["block1", "block1.pool", "block2", "block3.pool"]
    network, x = small_cnn(places), small_batch()[0]
    network(x)  # moves BatchNorm's statistics
    fossilize_seed(slot_named(network, "block1"), "conv_light")
    fossilize_seed(slot_named(network, "block1.pool"), "conv_small", bias=False)
    fossilize_seed(slot_named(network, "block2"), "conv_small", Ramp(0.0, 0.5, 1, "linear"))
    fossilize_seed(slot_named(network, "block3.pool"), "attention")
    into = {folding.slot: folding.target_layer for folding in fold_and_check(network, x)}
    assert into == {"block1": "block1", "block1.pool": "convs.1", "block2": "block2", "block3.pool": None}


def test_our_mlp_takes_low_rank_seeds_into_the_next_layer() -> None:
    network, x = MLP((5,), 3, width=WIDTH, layers=2), example("vector")
    size = count_parameters(network)
    for slot in slots_of(network).values():
        fossilize_seed(slot, "lora")
    assert fold_and_check(network, x) == [FoldResult("layer1", "layers.1", ""), FoldResult("layer2", "head", "")]
    assert count_parameters(network) == size


def test_between_the_residual_blocks_of_our_gpt_nothing_can_take_a_seed() -> None:
    network = GPT((6,), 11, width=8, blocks=2, heads=2, context=8, slots=["layer1", "layer2"])
    for slot, blueprint in zip(slots_of(network).values(), ["lora", "lora_large"], strict=True):
        fossilize_seed(slot, blueprint)
    foldings = unchanged_by_folding(network, torch.arange(12).view(2, 6) % 11)
    assert [folding.slot for folding in foldings] == ["layer1", "layer2"]


@pytest.mark.parametrize(
    ("build", "kernel"),
    [
        (lambda c: Residual(nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1)), 1),
        (lambda c: Residual(nn.Conv2d(c, 4, 1, bias=False), nn.Conv2d(4, c, 3, padding=1)), 3),
        (lambda c: Residual(nn.Conv2d(c, 4, 3, padding=1), nn.Conv2d(4, c, 1)), 3),
        (lambda c: Residual(nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 3, padding=1)), None),  # padding drops the bias
        (lambda c: Residual(nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)), None),
        (lambda c: Residual(nn.Conv2d(c, c, 3, padding=2, dilation=2)), None),
        (lambda c: Residual(nn.Conv2d(c, c, 3, padding=1, padding_mode="circular")), None),
        (lambda c: Residual(nn.Conv2d(c, c, 1, groups=2)), None),
        (lambda c: Residual(nn.Dropout(0.5), nn.Conv2d(c, c, 1)), None),
        (lambda c: nn.Conv2d(c, c, 1), None),
    ],
    ids=[
        "1x1 1x1",
        "1x1 without bias, 3x3",
        "3x3 1x1",
        "1x1 with bias, 3x3",
        "3x3 3x3",
        "dilated",
        "circular",
        "grouped",
        "dropout",
        "no residual",
    ],
)
def test_a_blueprint_of_ones_own_folds_where_it_is_one_small_convolution(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[int], nn.Module], kernel: int | None
) -> None:
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))
    registry.register("own", {"image"}, parameters=lambda c: 0, flops=lambda c, n: 0)(build)
    network, x = chain("image", nn.Tanh(), nn.Tanh()).double(), example("image").double()
    germinate(network.slot, "own", DEFAULT_RAMP, generator=generator_of(), birth="random")
    add_noise(network.slot.seed)
    for stage in LIFE[1:]:
        network.slot.move_to(stage)
    affine = affine_map_of(network.slot)
    assert (affine[0].shape[-1] if affine else None) == kernel
    if kernel is None:
        unchanged_by_folding(network, x)
    else:
        feature = torch.randn(2, WIDTH, 5, 5, generator=generator_of(), dtype=torch.float64)
        whole = nn.functional.conv2d(feature, *affine, padding=kernel // 2)
        torch.testing.assert_close(whole, network.slot(feature), rtol=1e-10, atol=1e-12)
        assert fold_and_check(network, x, 1e-10) == [FoldResult("place", "place", "")]
