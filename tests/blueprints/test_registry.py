"""Registry of blueprints by layout and name, and initial weights from the explicit generator alone."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from esper_lightning.growth.blueprints import (
    Residual,
    blueprint_names,
    build_on,
    check_blueprint_name,
    get_blueprint,
    initialise,
    register,
    registry,
)
from esper_lightning.hosts import CNN
from tests.blueprints.features import feature, seed_of
from tests.growth.grown import CPU, generator_of

COUNTS: dict[str, Any] = {"parameters": lambda c: c * c + c, "flops": lambda c, n: 2 * n * c * c}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the registry after each test."""
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))


def one_by_one(channels: int) -> nn.Module:
    """Build a residual 1×1 convolution."""
    return Residual(nn.Conv2d(channels, channels, 1))


def test_a_registered_blueprint_is_offered_and_built() -> None:
    assert register("mine", {"image"}, **COUNTS)(one_by_one) is one_by_one
    assert blueprint_names("image")[-1] == "mine" and "mine" not in blueprint_names("sequence")
    mine = get_blueprint("mine", "image")
    assert (mine.name, mine.layouts, mine.parameters(5), mine.flops(5, 12)) == ("mine", {"image"}, 30, 600)
    seed = seed_of("mine", "image", 5, birth="identity")
    assert seed.body[0].weight.shape == (5, 5, 1, 1)
    assert torch.equal(seed(feature("image", 5)), feature("image", 5))


def test_one_name_may_stand_for_another_module_on_each_layout() -> None:
    register("conv_small", {"sequence", "vector"}, **COUNTS)(lambda c: Residual(nn.Linear(c, c)))
    assert get_blueprint("conv_small", "sequence") is get_blueprint("conv_small", "vector")
    assert isinstance(seed_of("conv_small", "image").body[0], nn.Conv2d)
    assert isinstance(seed_of("conv_small", "vector").body[0], nn.Linear)


def test_a_name_can_be_taken_only_once_on_a_layout() -> None:
    before = list(registry._BLUEPRINTS)
    with pytest.raises(ValueError, match=r"^blueprint 'lora' is already registered for vector features; choose anothe"):
        register("lora", {"image", "vector"}, **COUNTS)(one_by_one)
    assert list(registry._BLUEPRINTS) == before


def test_a_blueprint_that_cannot_begin_as_the_identity_says_so() -> None:
    register("bare", {"image"}, **COUNTS)(lambda c: nn.Conv2d(c, c, 1))
    with pytest.raises(ValueError, match=r"^blueprint 'bare' cannot begin as the identity: .* start_as_identity\(\)"):
        seed_of("bare", "image", birth="identity")
    assert seed_of("bare", "image", birth="random").weight.any()


def test_unknown_names_and_other_layouts_are_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    register("mix", {"mesh"}, **COUNTS)(one_by_one)
    for call, said in (
        (lambda: check_blueprint_name("botleneck"), r"^unknown blueprint 'botleneck'; did you mean 'bottleneck'\?$"),
        (lambda: get_blueprint("botleneck", "vector"), r"^unknown blueprint 'botleneck'; did you mean 'bottleneck'\?$"),
        (lambda: seed_of("xyzzy", "image"), r"^unknown blueprint 'xyzzy'; there are: norm, attention, .*, lora, "),
        (lambda: seed_of("gated", "mesh"), r"^blueprint 'gated' does not grow on mesh features; these do: mix$"),
        (lambda: get_blueprint("mix", "none"), r"^blueprint 'mix' does not grow on none features; these do: none$"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


# Initialisation.


def cnn() -> CNN:
    return CNN((1, 8, 8), 10, base=4)


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


class Scaled(nn.Module):
    """Module with a parameter of its own that changes its child during initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.zeros(3))

    def initialise(self, generator: torch.Generator) -> None:
        nn.init.constant_(self.scale, 7.0)
        nn.init.zeros_(self.linear.bias)


class Masked(nn.Module):
    """Module with a buffer whose value only the constructor sets: elsewhere it would be uninitialised memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.register_buffer("mask", torch.ones(4, 1, 1))


def test_initialising_a_used_host_makes_it_new() -> None:
    fresh, used = build_on(CPU, cnn, generator_of(3)), build_on(CPU, cnn, generator_of(8))
    assert not same(fresh, used)
    optimizer = torch.optim.SGD(used.parameters(), lr=0.1)
    used(torch.randn(4, 1, 8, 8, generator=generator_of())).square().mean().backward()
    optimizer.step()
    assert used.norms[0].num_batches_tracked == 1
    initialise(used, generator_of(3))
    assert same(used, fresh)  # BatchNorm's running statistics too


@pytest.mark.parametrize(
    ("layer", "bound"),
    [
        (nn.Conv2d(16, 64, 3), 1 / 12),  # 16·9 = 144 inputs
        (nn.Conv2d(64, 64, 5, groups=64), 1 / 5),  # 25 inputs: a depthwise convolution has one input channel
        (nn.Conv1d(16, 64, 9), 1 / 12),
        (nn.Conv3d(16, 64, 3), 1 / 432**0.5),
        (nn.ConvTranspose1d(64, 16, 9), 1 / 12),  # PyTorch uses the number of outputs here: 16·9
        (nn.ConvTranspose2d(64, 16, 3), 1 / 12),
        (nn.ConvTranspose3d(64, 16, 3), 1 / 432**0.5),
        (nn.Linear(100, 30), 1 / 10),
    ],
)
def test_weights_fill_the_usual_interval_evenly(layer: nn.Module, bound: float) -> None:
    initialise(layer, generator_of())
    assert 0.97 * bound < layer.weight.abs().max() <= bound
    assert layer.weight.mean().item() == pytest.approx(0.0, abs=0.05 * bound)
    assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)  # of a uniform distribution
    assert layer.bias.abs().max() <= bound
    assert layer.bias.std() > 0


@pytest.mark.parametrize(
    "build",
    [
        *(partial(norm, 4) for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)),
        *(partial(norm, 4, affine=True) for norm in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)),
        partial(nn.InstanceNorm2d, 4),
        partial(nn.InstanceNorm2d, 4, track_running_stats=True),
        *(partial(norm, 4) for norm in (nn.LayerNorm, nn.RMSNorm)),
        partial(nn.GroupNorm, 2, 4),
        partial(nn.PReLU, 4),
    ],
)
def test_normalisations_begin_as_pytorch_builds_them(build: Callable[[], nn.Module]) -> None:
    module, generator = build(), generator_of()
    for value in module.state_dict().values():
        value.fill_(9.0)
    initialise(module, generator)
    assert same(module, build())
    assert torch.equal(generator.get_state(), generator_of().get_state())  # draws no random numbers


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(3, 4, bias=False),
        nn.ConvTranspose3d(3, 4, 2),
        nn.EmbeddingBag(3, 4),
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
    ],
)
def test_layers_draw_from_the_generator_alone(layer: nn.Module) -> None:
    other, before = deepcopy(layer), torch.get_rng_state()
    initialise(layer, generator_of(3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    initialise(other, generator_of(3))
    assert same(layer, other)


def test_a_module_with_its_own_method_has_the_last_word() -> None:
    module = build_on(CPU, Scaled, generator_of())
    assert module.scale.tolist() == [7.0] * 3
    assert module.linear.bias.tolist() == [0.0] * 3
    assert module.linear.weight.any()


@pytest.mark.parametrize(
    ("module", "unknown"),
    [(nn.Bilinear(2, 3, 4), "Bilinear"), (nn.Sequential(nn.LSTM(2, 2)), "LSTM"), (Masked(), "Masked")],
)
def test_a_module_whose_parameters_or_buffers_are_unknown_is_refused_by_name(module: nn.Module, unknown: str) -> None:
    with pytest.raises(ValueError, match=rf"^cannot initialise a {unknown}: give it a method initialise\(generator\)$"):
        initialise(module, generator_of())
