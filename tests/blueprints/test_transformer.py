"""Attention blueprints never depend on later positions of a sequence."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from esper_lightning.blueprints import blueprint_names, build_seed, transformer
from esper_lightning.blueprints.transformer import WINDOW, attention_heads
from tests.blueprints.features import CPU, feature, seeded

CUDA = torch.device("cuda")


def attention_by_hand(seed: nn.Module, x: Tensor, heads: int, window: int) -> Tensor:
    """Return x plus causal attention over the last `window` positions, in float64, one softmax at a time."""
    w_in, b_in, w_out, b_out = (parameter.detach().double().cpu() for parameter in seed.parameters())
    x = x.double().cpu()
    q, k, v = (x @ w_in.T + b_in).chunk(3, dim=-1)  # each [B, T, C]
    gathered, size = torch.zeros_like(x), x.shape[-1] // heads
    for sample in range(len(x)):
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            for t in range(x.shape[1]):
                seen = slice(max(0, t + 1 - window), t + 1)
                weights = torch.exp(k[sample, seen, own] @ q[sample, t, own] / math.sqrt(size))
                gathered[sample, t, own] = weights @ v[sample, seen, own] / weights.sum()
    return x + gathered @ w_out.T + b_out


@pytest.mark.parametrize(("width", "heads"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 4), (33, 1), (384, 4)])
def test_four_heads_where_they_divide_the_width(width: int, heads: int) -> None:
    assert attention_heads(width) == heads


@pytest.mark.parametrize(("width", "heads"), [(8, 4), (6, 2), (5, 1)])
def test_attention_by_hand(width: int, heads: int) -> None:
    seed = build_seed("attention", "sequence", width, device=CPU, generator=seeded(), birth="random").double()
    x = feature("sequence", width, positions=(3, 4)).double()
    torch.testing.assert_close(seed(x), attention_by_hand(seed, x, heads, window=12))


@pytest.mark.parametrize("name", blueprint_names("sequence", CPU))
def test_a_later_position_cannot_change_an_earlier_output(name: str) -> None:
    seed, x = (
        build_seed(name, "sequence", 8, device=CPU, generator=seeded(), birth="random"),
        feature("sequence", 8, positions=(1, 12)),
    )
    for t in range(12):
        changed = x.clone()
        changed[:, t] += 10.0
        torch.testing.assert_close(seed(changed)[:, :t], seed(x)[:, :t])
        assert not torch.allclose(seed(changed)[:, t], seed(x)[:, t])


def test_attention_hears_of_every_earlier_position() -> None:
    seed, x = (
        build_seed("attention", "sequence", 8, device=CPU, generator=seeded(), birth="random"),
        feature("sequence", 8, positions=(1, 12)),
    )
    x.requires_grad_()
    (seed(x)[:, -1] ** 3).sum().backward()
    assert x.grad.flatten(0, 1).any(dim=1).all()


def test_flex_attention_is_offered_only_where_it_runs() -> None:
    assert "flex_attention" not in blueprint_names("sequence", CPU)
    assert "flex_attention" in blueprint_names("sequence", CUDA)
    assert "flex_attention" in blueprint_names("sequence", torch.device("cuda:1"))
    with pytest.raises(ValueError, match=r"^blueprint 'flex_attention' does not run on cpu; it runs on: cuda$"):
        build_seed("flex_attention", "sequence", 8, device=CPU, generator=seeded())


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace compiled FlexAttention by the uncompiled one: slower, no gradients on a CPU, but the same results."""
    monkeypatch.setattr(transformer, "compiled_flex_attention", lambda channels: flex_attention)


@torch.no_grad()
@pytest.mark.usefixtures("not_compiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("width", [8, 64])  # fewer channels per head than the kernel's minimum, and exactly as many
def test_windowed_attention_by_hand(width: int) -> None:
    seed = transformer.windowed_attention(width)
    x = feature("sequence", width, samples=2, positions=(1, WINDOW + 9))
    expected = attention_by_hand(seed, x, 4, WINDOW)
    torch.testing.assert_close(seed(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(attention_by_hand(seed, x, 4, window=len(x[0])), expected, rtol=1e-3, atol=1e-3)


def test_a_mask_first_built_in_evaluation_serves_training() -> None:
    attend = transformer.WindowedAttentionCore(heads=1)
    with torch.inference_mode():
        mask = attend.block_mask(3, CPU)
    assert not mask.kv_indices.is_inference()
    assert attend.block_mask(3, CPU) is mask
    assert attend.block_mask(5, CPU) is not mask


def test_every_seed_has_a_mask_of_its_own() -> None:
    """Hosts on several CUDA streams share no mask tensor."""
    first, second = transformer.WindowedAttentionCore(heads=1), transformer.WindowedAttentionCore(heads=1)
    assert first.block_mask(3, CPU) is not second.block_mask(3, CPU)


def test_each_head_size_is_compiled_for_itself_and_for_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **settings: compiled.append((function, settings)))
    compiled_flex_attention = transformer.compiled_flex_attention.__wrapped__
    for channels in (16, 32):
        compiled_flex_attention(channels)

    assert [settings for _, settings in compiled] == [{"dynamic": True}] * 2
    assert compiled[0][0].__code__ != compiled[1][0].__code__, "torch counts compilations by code object"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("positions", [WINDOW - 5, 3 * WINDOW + 1])
def test_flex_attention_is_attention_under_a_windowed_mask(width: int, positions: int) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    seed = build_seed("flex_attention", "sequence", width, device=CUDA, generator=generator, birth="random")
    x = feature("sequence", width, positions=(1, positions)).to(CUDA).requires_grad_()

    place = torch.arange(positions, device=CUDA)
    distance = place[:, None] - place
    projections, _, output = seed.body
    q, k, v = projections(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < WINDOW))
    expected = x + output(mixed.transpose(1, 2).flatten(2))

    found = seed(x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    learned = [torch.autograd.grad((y**2).sum(), [x, *seed.parameters()]) for y in (found, expected)]
    torch.testing.assert_close(*learned, rtol=1e-2, atol=1e-2)
