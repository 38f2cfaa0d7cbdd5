"""The decoder-only transformer host."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.blueprints import build_on
from esper_lightning.growth.alpha import Ramp
from esper_lightning.growth.lifecycle import count_parameters, slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import GPT
from esper_lightning.hosts.transformer import rotate
from tests.growth.grown import add_noise, grow
from tests.hosts.variants import check_leave_one_out

LENGTH, VOCABULARY = 12, 20


def built(seed: int = 0, **options: Any) -> GPT:
    """Return a host of four blocks of width 16 with two heads, changed by `options`."""
    options = {"width": 16, "blocks": 4, "heads": 2, "context": 16} | options
    generator = torch.Generator().manual_seed(seed)
    return build_on(torch.device("cpu"), lambda: GPT((LENGTH,), VOCABULARY, **options), generator)


def tokens(samples: int = 5) -> Tensor:  # [B, T]
    return torch.randint(VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("input_shape", "outputs", "options", "parameters"),
    [
        ((256,), 50_257, {}, 30_044_544),
        ((64,), 50_257, {}, 30_044_544),  # the context counts, not the task's length
        ((256,), 50_257, {"heads": 12}, 30_044_544),
        # 10·4 + 8·4 + (12·4² + 9·4 + 4·4) + 2·4
        ((8,), 10, {"width": 4, "blocks": 1, "heads": 2, "context": 8}, 324),
        # 10·4 + (12·4² + 2·4) + 4: no positions, no biases
        (
            (8,),
            10,
            {"width": 4, "blocks": 1, "heads": 2, "context": 8, "rotary": True, "rms_norm": True, "bias": False},
            244,
        ),
    ],
)
def test_the_number_of_parameters_is_pinned(
    input_shape: tuple[int, ...], outputs: int, options: dict[str, Any], parameters: int
) -> None:
    with torch.device("meta"):
        assert count_parameters(GPT(input_shape, outputs, **options)) == parameters
        assert count_parameters(GPT(input_shape, outputs, **options, slots=[])) == parameters  # no parameters in slots


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({"blocks": 6}, ["layer2", "layer4", "layer6"]),
        ({"blocks": 5}, ["layer1", "layer3", "layer5"]),
        ({"blocks": 2}, ["layer2"]),
        ({"blocks": 1}, ["layer1"]),
        ({"slots": []}, []),
        ({"slots": ["layer4", "layer1", "layer3"]}, ["layer1", "layer3", "layer4"]),
        ({"blocks": 10, "slots": ["layer10", "layer2"]}, ["layer2", "layer10"]),
    ],
)
def test_slots_are_in_the_order_of_the_forward_pass(options: dict[str, Any], slots: list[str]) -> None:
    assert list(slots_of(built(**options))) == slots


def test_a_slot_sees_what_its_block_computed() -> None:
    network, seen = built(slots=["layer1", "layer3"]), {}
    for name, module in [*slots_of(network).items(), *((f"block{i}", b) for i, b in enumerate(network.blocks))]:
        module.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: (inputs[0], output)}))
    network(tokens())
    assert seen["layer1"][0].shape == (5, LENGTH, 16)
    assert torch.equal(seen["layer1"][0], seen["block0"][1])
    assert torch.equal(seen["layer3"][0], seen["block2"][1])
    assert {(slot.layout, slot.width) for slot in slots_of(network).values()} == {("sequence", 16)}


def reference(network: GPT, x: Tensor) -> Tensor:
    """Return the output of torch's own encoder layers with a causal mask, for the same weights."""
    features = network.tokens.weight[x] + network.positions.weight[: x.shape[1]]
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=features.dtype)
    for block in network.blocks:
        width, heads = features.shape[-1], block.attention.heads
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        ).to(features.dtype)
        pairs = [
            (layer.self_attn.in_proj_weight, block.attention.qkv.weight),
            (layer.self_attn.in_proj_bias, block.attention.qkv.bias),
            *zip(layer.self_attn.out_proj.parameters(), block.attention.project.parameters(), strict=True),
            *zip(layer.linear1.parameters(), block.mlp[0].parameters(), strict=True),
            *zip(layer.linear2.parameters(), block.mlp[2].parameters(), strict=True),
            *zip(layer.norm1.parameters(), block.norm1.parameters(), strict=True),
            *zip(layer.norm2.parameters(), block.norm2.parameters(), strict=True),
        ]
        for theirs, ours in pairs:
            theirs.data.copy_(ours.data)
        features = layer(features, src_mask=mask)
    return network.norm(features) @ network.tokens.weight.T


@pytest.mark.parametrize("length", [1, 7, LENGTH])
def test_the_outputs_are_those_of_torchs_own_layers(length: int) -> None:
    network = built(heads=4).double()
    add_noise(network)  # so that biases and norms matter
    x = tokens()[:, :length]
    torch.testing.assert_close(network(x), reference(network, x), rtol=1e-10, atol=1e-10)


def test_no_output_depends_on_a_later_token() -> None:
    network = built(slots=["layer1", "layer3"])
    add_noise(network)
    for name, stage in (("layer1", Stage.BLENDING), ("layer3", Stage.FOSSILIZED)):
        grow(slots_of(network)[name], stage, "attention")
    x = tokens()
    changed = x.clone()
    changed[:, 8] = (x[:, 8] + 1) % VOCABULARY
    before, after = network(x), network(changed)
    torch.testing.assert_close(after[:, :8], before[:, :8])
    assert (after[:, 8:] - before[:, 8:]).abs().amax((0, 2)).min() > 1e-3  # and all later ones do


def test_rotary_attention_depends_on_distances_alone() -> None:
    q, k = torch.randn(2, 9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = rotate(q[:1].expand(9, -1)) @ rotate(k[:1].expand(9, -1)).T  # of equal queries and keys at all positions

    for distance in range(-3, 4):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-6, atol=1e-6)
    assert scores[0].unique().numel() == 9
    torch.testing.assert_close(rotate(q).norm(dim=1), q.norm(dim=1))


def test_a_host_with_rotary_positions_knows_the_order_of_tokens() -> None:
    network = built(rotary=True, rms_norm=True, bias=False)
    add_noise(network)
    x = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])

    outputs = network(x)

    assert not any(name.endswith("bias") or name.startswith("positions") for name, _ in network.named_parameters())
    assert (outputs[0, -1] - outputs[1, -1]).abs().max() > 1e-4
    assert torch.equal(network(x.to(torch.uint8)), outputs), "tokens may be bytes"


def test_first_weights_are_small_and_smaller_where_they_enter_the_sum() -> None:
    network = built(width=128, slots=["layer2"])
    stds = {name: p.std().item() for name, p in network.named_parameters() if p.ndim == 2}
    into_sum = {name: std for name, std in stds.items() if name.endswith(("project.weight", "mlp.2.weight"))}
    assert len(into_sum) == 2 * 4
    assert into_sum == pytest.approx(dict.fromkeys(into_sum, 0.02 / math.sqrt(2 * 4)), rel=0.03)
    others = {name: std for name, std in stds.items() if name not in into_sum}
    assert others == pytest.approx(dict.fromkeys(others, 0.02), rel=0.06)
    assert not any(p.any() for name, p in network.named_parameters() if name.endswith("bias"))
    loss = F.cross_entropy(network(tokens()).flatten(0, 1), tokens().roll(1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(VOCABULARY), abs=0.2)  # a fresh host predicts at chance level


def test_empty_slots_change_neither_the_weights_nor_the_outputs() -> None:
    x = tokens()
    assert torch.equal(built(slots=["layer1", "layer2", "layer4"])(x), built(slots=[])(x))
    assert not torch.equal(built(seed=1)(x), built()(x))


@pytest.mark.parametrize(("isolate", "expected"), [(None, False), (True, True), (False, False)])
def test_slots_isolate_as_the_host_is_told(isolate: bool | None, expected: bool) -> None:
    assert {slot.detach_input for slot in slots_of(built(isolate=isolate)).values()} == {expected}


def test_a_few_steps_of_training_find_the_next_token() -> None:
    network = built()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    x = (tokens()[:, :1] + 3 * torch.arange(LENGTH + 1)) % VOCABULARY  # each token is three more than the last
    for _ in range(60):
        loss = F.cross_entropy(network(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1 * math.log(VOCABULARY)


def test_leaving_out_one_seed_at_a_time_equals_plain_passes() -> None:
    network = built(slots=["layer1", "layer2", "layer4"])
    add_noise(network)
    half = Ramp(start=0.0, target=0.5, ticks=1, curve="linear")
    grow(slots_of(network)["layer1"], Stage.PROBATIONARY, "attention", half)
    grow(slots_of(network)["layer2"], Stage.FOSSILIZED, "mlp_small")
    grow(slots_of(network)["layer4"], Stage.BLENDING, "lora", Ramp(0.0, 1.0, 4, "linear"))
    check_leave_one_out(network, tokens())


@pytest.mark.parametrize(
    ("input_shape", "options", "message"),
    [
        ((1, 8, 8), {}, r"needs sequences of tokens of shape \(T,\), the task gives \(1, 8, 8\)"),
        ((8,), {"width": 0}, "width, blocks and heads must be positive, got 0, 6, 6"),
        ((8,), {"blocks": 0}, "width, blocks and heads must be positive, got 384, 0, 6"),
        ((8,), {"blocks": 10**9}, "blocks must be at most 1000, got 1000000000"),
        ((8,), {"context": 10**18}, "context must be at most 1048576, got 1"),
        ((8,), {"heads": 0}, "width, blocks and heads must be positive, got 384, 6, 0"),
        ((8,), {"width": 6, "heads": 2, "rotary": True}, "rotary positions need an even width / heads, got 6 / 2"),
        ((8,), {"heads": 5}, "heads must divide width = 384, got 5"),
        ((257,), {}, "context must be at least 257, the task's length, got 256"),
        ((8,), {"slots": ["layer7"]}, "unknown slot 'layer7'; did you mean 'layer"),
        ((8,), {"slots": ["layer1", "layer1"]}, "slot 'layer1' is named twice"),
    ],
)
def test_a_host_that_cannot_be_built_says_why(
    input_shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        GPT(input_shape, VOCABULARY, **options)
