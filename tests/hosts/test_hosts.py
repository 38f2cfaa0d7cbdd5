"""The three hosts: sizes, slots, refusals, and what each computes."""

from collections.abc import Callable
from copy import deepcopy
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.blueprints import build_on
from esper_lightning.growth.counterfactual import forward_variants
from esper_lightning.growth.lifecycle import count_parameters, germinate, slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN, GPT, MLP
from tests.growth.grown import add_noise, grow

LENGTH, VOCABULARY = 12, 20
ALL = ["block1", "block1.pool", "block2", "block2.pool", "block3", "block3.pool"]
TINY_GPT = {"width": 4, "blocks": 1, "heads": 2, "context": 8}


def built(make: Callable[..., nn.Module], *shape: int, seed: int = 0, **options: Any) -> Any:
    """Return a host with initialised weights: ten classes, or 20 tokens for a GPT."""
    outputs = VOCABULARY if make is GPT else 10
    return build_on(torch.device("cpu"), lambda: make(shape, outputs, **options), torch.Generator().manual_seed(seed))


def cnn(**options: Any) -> CNN:
    return built(CNN, 3, 32, 32, **options)


def mlp(**options: Any) -> MLP:
    return built(MLP, 1, 4, 4, **{"width": 16, "layers": 3} | options)


def gpt(**options: Any) -> GPT:
    return built(GPT, LENGTH, **{"width": 16, "blocks": 4, "heads": 2, "context": 16} | options)


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens(samples: int = 5) -> Tensor:  # [B, T]
    return torch.randint(VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(1))


HOSTS = {"cnn": (cnn, images(6, 3, 32, 32)), "mlp": (mlp, images(6, 1, 4, 4)), "gpt": (gpt, tokens())}
every_host = pytest.mark.parametrize("kind", HOSTS)


@pytest.mark.parametrize(
    ("make", "input_shape", "outputs", "options", "parameters"),
    [
        (CNN, (3, 32, 32), 10, {}, 6_418),
        (CNN, (3, 32, 32), 10, {"base": 32}, 94_762),
        (CNN, (3, 32, 32), 10, {"base": 2, "kernel": 1, "pools": 0}, 164),
        (CNN, (3, 32, 32), 10, {"base": 1, "kernel": 1}, 77),
        (CNN, (1, 8, 8), 10, {"base": 4, "kernel": 1, "pools": 2}, 390),
        (CNN, (1, 8, 8), 10, {"widths": [4, 4, 8], "kernel": 1, "pools": 2, "residual": True}, 210),
        (CNN, (3, 32, 32), 10, {"depth": 1, "most": 2}, 6_418 + sum(2 * 9 * c**2 + 2 * c for c in (8, 16, 32))),
        (MLP, (1, 8, 8), 10, {}, 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10),
        (MLP, (3,), 10, {"width": 2, "layers": 3}, 3 * 2 + 2 + 2 * (2 * 2 + 2) + 2 * 10 + 10),
        (GPT, (256,), 50_257, {}, 30_044_544),
        (GPT, (64,), 50_257, {"heads": 12}, 30_044_544),  # the context counts, not the task's length
        (GPT, (8,), 10, TINY_GPT, 10 * 4 + 8 * 4 + (12 * 4**2 + 9 * 4 + 4 * 4) + 2 * 4),
        # no positions, no biases
        (GPT, (8,), 10, TINY_GPT | {"rotary": True, "rms_norm": True, "bias": False}, 10 * 4 + 12 * 4**2 + 2 * 4 + 4),
    ],
)
def test_the_number_of_parameters_is_pinned(
    make: Any, input_shape: tuple[int, ...], outputs: int, options: dict[str, Any], parameters: int
) -> None:
    with torch.device("meta"):
        assert count_parameters(make(input_shape, outputs, **options)) == parameters
        assert count_parameters(make(input_shape, outputs, **options, slots=[])) == parameters


@pytest.mark.parametrize(
    ("make", "options", "slots"),
    [
        (cnn, {}, ["block1.pool", "block2.pool", "block3.pool"]),
        (cnn, {"pools": 2}, ["block1.pool", "block2.pool", "block3"]),
        (cnn, {"slots": []}, []),
        (cnn, {"blocks": 2, "depth": 2, "most": 3}, ["block1.pool", "block2.pool", "block1.stack1", "block2.stack1"]),
        (cnn, {"slots": ALL[::-1]}, ALL),
        (cnn, {"blocks": 10, "base": 1, "pools": 0, "slots": ["block10", "block2"]}, ["block2", "block10"]),
        (mlp, {}, ["layer1", "layer2", "layer3"]),
        (mlp, {"slots": ["layer3", "layer1"]}, ["layer1", "layer3"]),
        (gpt, {"blocks": 6}, ["layer2", "layer4", "layer6"]),
        (gpt, {"blocks": 5}, ["layer1", "layer3", "layer5"]),
        (gpt, {"blocks": 1}, ["layer1"]),
        (gpt, {"slots": ["layer4", "layer1", "layer3"]}, ["layer1", "layer3", "layer4"]),
    ],
)
def test_slots_are_in_the_order_of_the_forward_pass(make: Any, options: dict[str, Any], slots: list[str]) -> None:
    assert list(slots_of(make(**options))) == slots


def check_leave_one_out(network: nn.Module, x: Tensor) -> None:
    """Check every variant; every slot must hold a blended seed, and all seeds differ."""
    network = network.double().eval()
    x = x.double() if x.is_floating_point() else x
    names = list(slots_of(network))
    variants = [frozenset(names), *(frozenset(names) - {name} for name in names), frozenset()]
    with torch.inference_mode():
        outputs, places = forward_variants(network, variants, x)
        groups = outputs.unflatten(0, (len(variants), -1))
        assert sorted(places) == list(range(len(variants)))
        for variant, place in zip(variants, places, strict=True):
            plain = deepcopy(network)
            for name, slot in slots_of(plain).items():
                if name not in variant:
                    slot.empty()
            torch.testing.assert_close(groups[place], plain(x), rtol=1e-10, atol=1e-10)
            assert place == places[0] or not torch.allclose(groups[place], groups[places[0]])


@every_host
def test_leaving_out_one_seed_at_a_time_equals_plain_passes(kind: str) -> None:
    make, x = HOSTS[kind]
    names, seeds = {
        "cnn": (["block1", "block2.pool", "block3"], ["conv_light", "norm", "depthwise"]),
        "mlp": (["layer1", "layer2", "layer3"], ["mlp_small", "gated", "norm"]),
        "gpt": (["layer1", "layer2", "layer4"], ["attention", "mlp_small", "lora"]),
    }[kind]
    network = make(slots=names)
    add_noise(network)
    slots = list(slots_of(network).values())
    grow(slots[0], Stage.PROBATIONARY, seeds[0], Ramp(2))
    grow(slots[1], Stage.FOSSILIZED, seeds[1])
    grow(slots[2], Stage.BLENDING, seeds[2], Ramp(4))
    check_leave_one_out(network, x)


@pytest.mark.parametrize(
    ("make", "input_shape", "options", "message"),
    [
        (CNN, (8, 8), {}, r"needs images of shape \(C, H, W\), the task gives \(8, 8\)"),
        (CNN, (3, 32, 32), {"base": 0}, r"blocks of positive widths and an odd kernel, got \[0, 0, 0\], 3"),
        (CNN, (3, 32, 32), {"blocks": 0}, r"blocks of positive widths and an odd kernel, got \[\], 3"),
        (CNN, (3, 32, 32), {"kernel": 2}, r"an odd kernel, got \[8, 16, 32\], 2"),
        (CNN, (3, 32, 32), {"most": 1}, "most needs a depth of at least 1, got depth 0 and most 1"),
        (CNN, (3, 32, 32), {"depth": 2, "most": 1}, "'residuals.0' has 2 blocks from the start; .* as many, got 1"),
        (CNN, (3, 32, 32), {"pools": 4}, "pools must lie between 0 and the number of blocks, 3"),
        (CNN, (3, 32, 7), {}, r"need images of at least 2\*\*pools pixels, got 3 for \(32, 7\)"),
        (CNN, (3, 32, 32), {"slots": ["block3.pool"], "pools": 2}, r"unknown slot 'block3\.pool'; did you mean 'block"),
        (MLP, (4,), {"width": 0}, "width and layers must be positive, got 0, 2"),
        (GPT, (1, 8, 8), {}, r"needs sequences of tokens of shape \(T,\), the task gives \(1, 8, 8\)"),
        (GPT, (8,), {"blocks": 0}, "width, blocks and heads must be positive, .* got 384, 0, 6"),
        (GPT, (8,), {"width": 6, "heads": 2, "rotary": True}, "with rotary positions into an even number"),
        (GPT, (8,), {"heads": 5}, "heads must divide width .* got 384, 6, 5"),
        (GPT, (257,), {}, "context must be at least 257, the task's length, got 256"),
    ],
)
def test_a_host_that_cannot_be_built_says_why(
    make: Any, input_shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        make(input_shape, 10, **options)


def test_duplicate_slots_are_caught_everywhere_with_one_message() -> None:
    """F16: a host with a slot requested twice and a network with two slots of one name raise the same error."""
    message = "^slot 'block1' is named twice; name each slot once$"
    with pytest.raises(ValueError, match=message):
        cnn(slots=["block1", "block2", "block1"])
    network = nn.Sequential(SeedSlot("block1", "image", 4), SeedSlot("block1", "image", 4))
    with pytest.raises(ValueError, match=message):
        slots_of(network)


def test_a_residual_block_adds_its_input_before_the_relu() -> None:
    network = built(CNN, 1, 8, 8, widths=[2, 2], kernel=1, pools=0, slots=[], residual=True).eval()
    x = images(4, 1, 8, 8)
    first = torch.relu(network.norms[0](network.convs[0](x)) + network.shortcuts[0](x))
    second = torch.relu(network.norms[1](network.convs[1](first)) + first)
    torch.testing.assert_close(network(x), network.head(second.mean((2, 3))))


def test_residual_blocks_follow_the_slots_of_a_block_and_their_copies_follow_them() -> None:
    network = built(CNN, 1, 8, 8, widths=[2, 4], pools=1, slots=["block1.pool", "block2"], depth=2, most=6)
    slots = slots_of(network)
    grow(slots["block1.pool"], Stage.PROBATIONARY, "conv_small")
    germinate(slots["block2.stack1"], "stack", generator=torch.Generator().manual_seed(0))
    add_noise(network.eval().double())

    def residual(block: nn.Module, x: Tensor) -> Tensor:
        return x + block.conv2(torch.relu(block.conv1(block.norm(x))))

    x = images(4, 1, 8, 8).double()
    first = slots["block1.pool"](F.max_pool2d(torch.relu(network.norms[0](network.convs[0](x))), 2))
    first = reduce(lambda x, block: residual(block, x), network.residuals[0], first)
    second = torch.relu(network.norms[1](network.convs[1](first)))
    second = reduce(lambda x, block: residual(block, x), network.residuals[1], second)
    assert [len(blocks) for blocks in network.residuals] == [2, 4]
    torch.testing.assert_close(network(x), network.head(second.mean((2, 3))))


FORMATS = {False: torch.contiguous_format, True: torch.channels_last}


@pytest.mark.parametrize("input_shape", [(3, 32, 32), (1, 8, 8)])
@pytest.mark.parametrize("channels_last", FORMATS)
def test_features_and_seeds_have_the_hosts_memory_format(input_shape: tuple[int, ...], channels_last: bool) -> None:
    network, seen = built(CNN, *input_shape, slots=ALL, channels_last=channels_last), []
    for slot in slots_of(network).values():
        grow(slot, Stage.BLENDING, "bottleneck")
        for module in (slot, *slot.seed.modules()):
            module.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0], output]))
    network(images(4, *input_shape))
    seen = [x for x in seen if min(x.shape[2:]) > 1]  # images of one pixel have either format
    assert len(seen) > 40
    assert all(x.is_contiguous(memory_format=FORMATS[channels_last]) for x in seen)
    assert not any(x.is_contiguous(memory_format=FORMATS[not channels_last]) for x in seen)


def reference(network: GPT, x: Tensor) -> Tensor:
    """Return the output of torch's own encoder layers with a causal mask, for the same weights."""
    features = network.tokens.weight[x] + network.positions.weight[: x.shape[1]]
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=features.dtype)
    for block in network.blocks:
        width, heads = features.shape[-1], block.attention.heads
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        ).to(features.dtype)
        theirs = [layer.self_attn, layer.self_attn.out_proj, layer.linear1, layer.linear2, layer.norm1, layer.norm2]
        ours = [block.attention.qkv, block.attention.project, block.mlp[0], block.mlp[2], block.norm1, block.norm2]
        for their, our in zip(theirs, ours, strict=True):
            for to, of in zip(their.parameters(recurse=False), our.parameters(), strict=True):
                to.data.copy_(of.data)
        features = layer(features, src_mask=mask)
    return network.norm(features) @ network.tokens.weight.T


@pytest.mark.parametrize("length", [1, LENGTH])
def test_the_outputs_of_a_gpt_are_those_of_torchs_own_layers(length: int) -> None:
    network = gpt(heads=4).double()
    add_noise(network)  # so that biases and norms matter
    x = tokens()[:, :length]
    torch.testing.assert_close(network(x), reference(network, x), rtol=1e-10, atol=1e-10)


def test_no_output_depends_on_a_later_token() -> None:
    network = gpt(slots=["layer1", "layer3"])
    add_noise(network)
    for name, stage in (("layer1", Stage.BLENDING), ("layer3", Stage.FOSSILIZED)):
        grow(slots_of(network)[name], stage, "attention")
    x = tokens()
    changed = x.clone()
    changed[:, 8] = (x[:, 8] + 1) % VOCABULARY
    before, after = network(x), network(changed)
    torch.testing.assert_close(after[:, :8], before[:, :8])
    assert (after[:, 8:] - before[:, 8:]).abs().amax((0, 2)).min() > 1e-3  # and all later ones do


def test_a_host_with_rotary_positions_knows_the_order_of_tokens() -> None:
    network = gpt(rotary=True, rms_norm=True, bias=False)
    add_noise(network)
    outputs = network(torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]]))
    assert not any(name.endswith("bias") or name.startswith("positions") for name, _ in network.named_parameters())
    assert (outputs[0, -1] - outputs[1, -1]).abs().max() > 1e-4
    bytes_of_them = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]], dtype=torch.uint8)
    assert torch.equal(network(bytes_of_them), outputs), "tokens may be bytes"
