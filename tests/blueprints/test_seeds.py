"""Every blueprint: its birth, its size, and what its module computes."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper_lightning.growth.blueprints import Residual, blueprint_names, get_blueprint
from tests.blueprints.features import EVERYTHING, feature, seed_of

everywhere = pytest.mark.parametrize(("layout", "name"), EVERYTHING)

SIZES = {  # parameters at 8 and at 64 channels, in the order in which settings offer the blueprints
    "image": {
        "norm": (17, 129),
        "attention": (8 * 4 + 4 + 4 * 8 + 8, 64 * 16 + 16 + 16 * 64 + 64),
        "conv_small": (72, 4160),
        "depthwise": (80 + 72, 640 + 4160),
        "bottleneck": (72 + 584 + 72, 1040 + 2320 + 1088),
        "conv_light": (584, 36928),
        "conv_heavy": (1168, 73856),
    },
    "sequence": {
        "norm": (17, 129),
        "lora": (128, 1024),
        "lora_large": (512, 4096),
        "mlp_small": (144 + 136, 8320 + 8256),
        "mlp": (288 + 264, 16640 + 16448),
        "attention": (216 + 72, 12480 + 4160),
    },
    "vector": {
        "norm": (17, 129),
        "lora": (128, 1024),
        "mlp_small": (144 + 136, 8320 + 8256),
        "mlp": (288 + 264, 16640 + 16448),
        "gated": (144 + 72, 8320 + 4160),
    },
}


@pytest.mark.parametrize("layout", SIZES)
def test_order_and_sizes_are_those_of_the_manual(layout: str) -> None:
    counts = {name: get_blueprint(name, layout).parameters for name in blueprint_names(layout)}
    assert [(name, (count(8), count(64))) for name, count in counts.items()] == list(SIZES[layout].items())


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


def attention_by_hand(seed: nn.Module, x: Tensor, heads: int) -> Tensor:
    """Return x plus causal attention, one softmax at a time."""
    w_in, b_in, w_out, b_out = seed.parameters()
    q, k, v = (x @ w_in.T + b_in).chunk(3, dim=-1)  # each [B, T, C]
    gathered, size = torch.zeros_like(x), x.shape[-1] // heads
    for sample in range(len(x)):
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            for t in range(x.shape[1]):
                weights = torch.exp(k[sample, : t + 1, own] @ q[sample, t, own] / math.sqrt(size))
                gathered[sample, t, own] = weights @ v[sample, : t + 1, own] / weights.sum()
    return x + gathered @ w_out.T + b_out


@torch.no_grad()
@pytest.mark.parametrize(("width", "heads"), [(8, 4), (6, 2), (5, 1)])
def test_attention_by_hand(width: int, heads: int) -> None:
    seed, x = seed_of("attention", "sequence", width).double(), feature("sequence", width, positions=(3, 4)).double()
    torch.testing.assert_close(seed(x), attention_by_hand(seed, x, heads))


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
