"""Folding of fossilized seeds: the same outputs from fewer layers; non-linear seeds are unchanged."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from esper_lightning.blueprints import blueprint_names, get_blueprint
from esper_lightning.growth.alpha import Ramp
from esper_lightning.growth.blend import BlendStyle
from esper_lightning.growth.fold import FoldResult, fold
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.slot import Layout
from esper_lightning.growth.stages import Stage
from tests.growth.chains import (
    PRECISION,
    WIDTH,
    Chain,
    chain,
    example,
    fold_and_check,
    fossilize_seed,
    linear,
    relative_change,
    unchanged_by_folding,
)
from tests.growth.grown import STYLES, generator_of, grow

FOLDABLE: list[tuple[Layout, str]] = [
    ("image", "conv_small"),
    ("image", "conv_light"),
    ("sequence", "lora"),
    ("sequence", "lora_large"),
    ("vector", "lora"),
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("target", [0.5, 1.0])
@pytest.mark.parametrize(("layout", "blueprint"), FOLDABLE)
def test_outputs_stay_and_the_seeds_parameters_go(
    layout: Layout, blueprint: str, target: float, dtype: torch.dtype
) -> None:
    network, x = chain(layout).to(dtype), example(layout).to(dtype)
    alone = count_parameters(network)
    fossilize_seed(network.slot, blueprint, Ramp(0.0, target, 1, "linear"))
    assert relative_change(network(x), chain(layout).to(dtype)(x)) > 0.01  # the seed has an effect

    foldings = fold_and_check(network, x, PRECISION[dtype])

    into = "place" if blueprint == "conv_light" else "before"
    assert foldings == [FoldResult("place", into, "")]
    # A 3×3 seed is replaced by one 3×3 convolution; any other seed adds no layer.
    assert count_parameters(network) - alone == (
        get_blueprint(blueprint, layout).parameters(WIDTH) if into == "place" else 0
    )
    assert {parameter.dtype for parameter in network.parameters()} == {dtype}
    other = torch.randn(3, *x.shape[1:], generator=generator_of(9)).to(dtype)
    assert torch.isfinite(network(other)).all()


@pytest.mark.parametrize(("layout", "blueprint"), FOLDABLE)
def test_a_fold_holds_for_other_inputs_than_the_example(layout: Layout, blueprint: str) -> None:
    network, x = chain(layout).double(), example(layout).double()
    fossilize_seed(network.slot, blueprint)
    grown = deepcopy(network)
    fold(network, x)
    other = 3.0 * torch.randn(5, *x.shape[1:], generator=generator_of(9), dtype=torch.float64)
    torch.testing.assert_close(network(other), grown(other), rtol=1e-10, atol=1e-12)


def shielded(layer: nn.Module) -> nn.Module:
    """Return the layer with a non-linear function between it and the slot."""
    return nn.Sequential(layer, nn.Tanh())


def conv(kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(3, WIDTH, kernel, **options)


def next_conv(kernel: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(WIDTH, 4, kernel, **options)


@pytest.mark.parametrize(
    ("layout", "before", "behind", "bias", "into"),
    [
        ("vector", linear(), nn.Tanh(), True, "before"),
        ("vector", linear(bias=False), nn.Tanh(), True, "before"),  # lora has no bias
        ("vector", shielded(linear()), nn.Linear(WIDTH, 4), True, "behind"),
        ("vector", shielded(linear()), nn.Linear(WIDTH, 4, bias=False), True, "behind"),
        ("vector", shielded(linear()), nn.Tanh(), True, None),
        ("sequence", linear(), nn.Tanh(), True, "before"),
        ("sequence", shielded(linear()), nn.Linear(WIDTH, 4), True, "behind"),
        ("sequence", shielded(linear()), nn.Tanh(), True, None),
        ("image", conv(padding=1), nn.Tanh(), True, "before"),
        ("image", conv(5, stride=2, padding=2, padding_mode="circular"), nn.Tanh(), True, "before"),
        ("image", conv(bias=False), nn.Tanh(), True, "place"),
        ("image", conv(bias=False), nn.Tanh(), False, "before"),
        ("image", conv(groups=3), nn.Tanh(), True, "place"),
        ("image", shielded(conv()), next_conv(1), True, "behind"),
        ("image", shielded(conv()), next_conv(1, stride=2), True, "behind"),
        ("image", shielded(conv()), next_conv(1, bias=False), True, "place"),
        ("image", shielded(conv()), next_conv(1, bias=False), False, "behind"),
        ("image", shielded(conv()), next_conv(3), True, "behind"),
        ("image", shielded(conv()), next_conv(3, padding="valid"), True, "behind"),
        ("image", shielded(conv()), next_conv(3, padding=1), True, "place"),  # the padding has no bias
        ("image", shielded(conv()), next_conv(3, padding=1), False, "behind"),
        ("image", shielded(conv()), next_conv(3, padding="same"), True, "place"),
        ("image", shielded(conv()), next_conv(1, groups=2), True, "place"),
        ("image", shielded(conv()), nn.ConvTranspose2d(WIDTH, 4, 3), True, "place"),
        ("image", nn.ConvTranspose2d(3, WIDTH, 3), nn.Tanh(), True, "place"),
    ],
)
def test_where_a_map_of_channels_goes(
    layout: Layout, before: nn.Module, behind: nn.Module, bias: bool, into: str | None
) -> None:
    network, x = deepcopy(Chain(layout, before, behind)).double(), example(layout).double()
    alone = count_parameters(network)
    fossilize_seed(network.slot, "conv_small" if layout == "image" else "lora", bias=bias)
    seed = count_parameters(network.slot.seed)
    (folding,) = fold_and_check(network, x, 1e-10)
    assert folding.target_layer == into
    assert count_parameters(network) - alone == (0 if into in ("before", "behind") else seed)
    if into is None:
        assert folding.reason == "no linear layer before or behind the slot can take it"


def test_not_even_a_small_bias_is_lost_to_a_layer_without() -> None:
    network, x = Chain("image", conv(bias=False), next_conv(1, bias=False)).double(), example("image").double()
    fossilize_seed(network.slot, "conv_small")
    network.slot.seed.body[-1].bias.data.mul_(1e-4)
    assert fold_and_check(network, x, 1e-10) == [FoldResult("place", "place", "")]
    assert network.before.bias is None
    assert network.behind.bias is None


@pytest.mark.parametrize("style", STYLES[1:])
@pytest.mark.parametrize(("layout", "blueprint"), FOLDABLE)
def test_a_seed_that_scales_or_chooses_is_left_alone(layout: Layout, blueprint: str, style: BlendStyle) -> None:
    network = chain(layout)
    fossilize_seed(network.slot, blueprint, style=style)
    (folding,) = unchanged_by_folding(network, example(layout))
    assert folding.reason == f"{blueprint} ({style}) is not an affine map of its input"


@pytest.mark.parametrize(
    ("layout", "blueprint"),
    [
        (layout, name)
        for layout in ("image", "sequence", "vector")
        for name in blueprint_names(layout)
        if (layout, name) not in FOLDABLE
    ],
)
def test_a_seed_that_is_not_linear_is_left_alone(layout: Layout, blueprint: str) -> None:
    network = chain(layout)
    fossilize_seed(network.slot, blueprint)
    (folding,) = unchanged_by_folding(network, example(layout))
    assert folding.reason == f"{blueprint} (add) is not an affine map of its input"


@pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY])
def test_a_live_seed_is_left_alone(stage: Stage) -> None:
    network = chain("image")
    grow(network.slot, stage, "conv_small")
    assert unchanged_by_folding(network, example("image")) == []


def test_a_network_in_which_nothing_grew_has_nothing_to_fold() -> None:
    assert unchanged_by_folding(chain("image"), example("image")) == []
    assert unchanged_by_folding(nn.Sequential(nn.Linear(5, 3)), example("vector")) == []
