"""Blueprints: their registry, initial weights from the explicit generator alone, and what each of them computes."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper_lightning.growth.blueprints import (
    Birth,
    Residual,
    blueprint_names,
    build_on,
    build_seed,
    check_blueprint_name,
    get_blueprint,
    initialise,
    register,
    registry,
)
from esper_lightning.hosts import CNN
from tests.growth.grown import CPU, generator_of

EVERYTHING = [(layout, name) for layout in ("image", "sequence", "vector") for name in blueprint_names(layout)]
"""Pairs of layout and blueprint."""


def seed_of(name: str, layout: str, width: int = 8, *, rng_seed: int = 0, birth: Birth = "random") -> nn.Module:
    return build_seed(name, layout, width, device=CPU, generator=generator_of(rng_seed), birth=birth)


def feature(layout: str, width: int = 8, samples: int = 3, positions: tuple[int, int] = (5, 7)) -> Tensor:
    """Draw a feature [B, C, H, W], [B, T, C] with T = H·W, or [B, C], of mean 0.5 and standard deviation 2."""
    height, length = positions
    shapes = {
        "image": (samples, width, height, length),
        "sequence": (samples, height * length, width),
        "vector": (samples, width),
    }
    return 2.0 * torch.randn(shapes[layout], generator=generator_of(width)) + 0.5


# Registry.


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


# Every blueprint.


everywhere = pytest.mark.parametrize(("layout", "name"), EVERYTHING)

SIZES = {  # parameters at 64 channels, in the order in which settings offer the blueprints
    "image": [129, 2128, 4160, 4800, 4448, 36928, 73856],
    "sequence": [129, 1024, 4096, 16576, 33088, 16640],
    "vector": [129, 1024, 16576, 33088, 12480],
}
NAMES = {
    "image": ["norm", "attention", "conv_small", "depthwise", "bottleneck", "conv_light", "conv_heavy"],
    "sequence": ["norm", "lora", "lora_large", "mlp_small", "mlp", "attention"],
    "vector": ["norm", "lora", "mlp_small", "mlp", "gated"],
}


@pytest.mark.parametrize("layout", SIZES)
def test_order_and_sizes_are_those_of_the_manual(layout: str) -> None:
    assert blueprint_names(layout) == NAMES[layout]
    assert [get_blueprint(name, layout).parameters(64) for name in NAMES[layout]] == SIZES[layout]


@everywhere
def test_the_number_of_parameters_is_known_before_the_seed_is_built(layout: str, name: str) -> None:
    blueprint = get_blueprint(name, layout)
    for width in range(1, 41):
        with torch.device("meta"):
            seed = blueprint.build(width)
        assert blueprint.parameters(width) == sum(p.numel() for p in seed.parameters()), width


@everywhere
@pytest.mark.parametrize(("width", "positions"), [(1, (1, 2)), (8, (5, 7)), (33, (8, 8))])
def test_the_number_of_operations_is_what_pytorch_counts(
    layout: str, name: str, width: int, positions: tuple[int, int]
) -> None:
    count = 1 if layout == "vector" else positions[0] * positions[1]
    # Attention as plain matrix products: not every PyTorch counts its fused kernel on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        seed_of(name, layout, width)(feature(layout, width, 3, positions))
    assert counter.get_total_flops() == 3 * get_blueprint(name, layout).flops(width, count)


@everywhere
@pytest.mark.parametrize("width", [1, 3, 8, 33])
def test_a_seed_is_born_as_the_identity_or_does_something_finite(layout: str, name: str, width: int) -> None:
    x = feature(layout, width)
    assert torch.equal(seed_of(name, layout, width, birth="identity")(x), x)
    y = seed_of(name, layout, width)(x)
    assert y.shape == x.shape and y.isfinite().all() and not torch.allclose(y, x)


@everywhere
def test_a_seed_born_at_random_passes_gradients_to_every_parameter_and_mixes_no_samples(layout: str, name: str) -> None:
    x, seed = feature(layout), seed_of(name, layout)
    y = seed(x)
    torch.testing.assert_close(y, torch.cat([seed(sample[None]) for sample in x]))
    (y**3).sum().backward()
    assert all(parameter.grad.any() for parameter in seed.parameters())


@torch.no_grad()
@pytest.mark.parametrize(("width", "heads"), [(8, 4), (6, 2), (5, 1)])
def test_attention_is_causal_attention_of_torch_added_to_its_input(width: int, heads: int) -> None:
    seed, x = seed_of("attention", "sequence", width).double(), feature("sequence", width, positions=(3, 4)).double()
    reference = nn.MultiheadAttention(width, heads, batch_first=True).double()
    for theirs, ours in zip(reference.parameters(), seed.parameters(), strict=True):
        theirs.copy_(ours)
    mask = nn.Transformer.generate_square_subsequent_mask(12, dtype=torch.float64)
    torch.testing.assert_close(seed(x), x + reference(x, x, x, attn_mask=mask)[0])


@pytest.mark.parametrize("name", blueprint_names("sequence"))
def test_a_later_position_cannot_change_an_earlier_output(name: str) -> None:
    seed, x = seed_of(name, "sequence"), feature("sequence", positions=(1, 12))
    for t in range(12):
        changed = x.clone()
        changed[:, t] += 10.0
        torch.testing.assert_close(seed(changed)[:, :t], seed(x)[:, :t])
        assert not torch.allclose(seed(changed)[:, t], seed(x)[:, t])


def test_the_body_of_a_residual_is_added_and_as_the_identity_its_last_layer_is_zero() -> None:
    first, last = nn.Linear(4, 6), nn.Linear(6, 4)
    seed, x = Residual(nn.Sequential(first, nn.Sequential(nn.ReLU(), last))), feature("vector", 4)
    assert torch.equal(seed(x), x + last(first(x).relu()))
    seed.start_as_identity()
    assert torch.equal(seed(x), x)
    assert first.weight.any() and not last.weight.any() and not last.bias.any()


@pytest.mark.parametrize(
    ("body", "last"), [([nn.Sequential(nn.Linear(4, 4), nn.ReLU())], "ends with ReLU"), ([nn.Sequential()], "is empty")]
)
def test_a_body_that_zeros_at_its_end_would_not_silence_is_refused(body: list[nn.Module], last: str) -> None:
    with pytest.raises(ValueError, match=rf"^Residual: the body {last}; end it with a linear layer or a convolution, "):
        Residual(*body)


@pytest.mark.parametrize("size", [(5, 7), (1, 1)])
def test_a_norm_learns_from_a_detached_feature_in_either_memory_format(size: tuple[int, int]) -> None:
    x, gradients = feature("image", positions=size), []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        seed = seed_of("norm", "image")
        seed(x.contiguous(memory_format=memory_format)).square().sum().backward()  # torch 2.11 would crash
        gradients.append(torch.cat([p.grad.flatten() for p in seed.parameters()]))
    torch.testing.assert_close(*gradients)
