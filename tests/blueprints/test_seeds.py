"""Every blueprint: its birth, its size, and what its module computes."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper_lightning.growth.blueprints import Residual, blueprint_names, get_blueprint
from tests.blueprints.features import EVERYTHING, feature, seed_of

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
