"""Each batched layer, against the same number of separate layers; and the layout of batched features."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper_lightning.envs.executors.fused import layers
from esper_lightning.envs.executors.fused.flat import Assignment, BatchedModule, FlatWeights
from esper_lightning.envs.executors.fused.layers import (
    MAX_PRODUCT_HOSTS,
    RowIndex,
    batch_inputs,
    batch_layers,
    broadcast_per_entry,
    merge,
    select_entries,
    split,
    unbatch_outputs,
)
from esper_lightning.growth.blueprints import build_on
from esper_lightning.growth.blueprints.seeds import GroupNorm, LearnedNorm
from esper_lightning.hosts.transformer import PositionEmbedding, TokenEmbedding
from tests.growth.grown import CPU, add_noise, generator_of

SAMPLES = 3

IMAGE, SEQUENCE, VECTOR = (4, 5, 5), (6, 4), (4,)
"""Shapes of one sample with 4 channels."""

WORDS = (6,)
"""Shape of one sample of indices."""

Make = Callable[[], nn.Module]

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def and_linear(make: Make) -> nn.Module:
    """Append a linear layer, whose weights show the gradient of a layer without weights."""
    return nn.Sequential(make(), nn.Linear(4, 2) if make.func is nn.LayerNorm else nn.Conv2d(4, 2, 1))


LAYERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "3x3": (partial(nn.Conv2d, 4, 6, 3, padding=1), IMAGE),
    "3x3, no bias": (partial(nn.Conv2d, 4, 6, 3, bias=False), IMAGE),
    "3x3, groups": (partial(nn.Conv2d, 4, 6, 3, groups=2), IMAGE),
    "3x3, strided and dilated": (partial(nn.Conv2d, 4, 6, 3, stride=2, padding=2, dilation=2), IMAGE),
    "same": (partial(nn.Conv2d, 4, 6, 3, padding="same"), IMAGE),
    "1x1": (partial(nn.Conv2d, 4, 6, 1), IMAGE),
    "1x1, no bias": (partial(nn.Conv2d, 4, 6, 1, bias=False), IMAGE),
    "1x1, strided": (partial(nn.Conv2d, 4, 6, 1, stride=2), IMAGE),
    "batch norm": (partial(nn.BatchNorm2d, 4), IMAGE),
    "batch norm, no weights": (partial(and_linear, partial(nn.BatchNorm2d, 4, affine=False)), IMAGE),
    "group norm": (partial(nn.GroupNorm, 2, 4), IMAGE),
    "our group norm": (partial(GroupNorm, 2, 4), IMAGE),
    "group norm, no weights": (partial(and_linear, partial(nn.GroupNorm, 2, 4, affine=False)), IMAGE),
    "linear, sequence": (partial(nn.Linear, 4, 6), SEQUENCE),
    "linear, vector, no bias": (partial(nn.Linear, 4, 6, bias=False), VECTOR),
    "layer norm, sequence": (partial(nn.LayerNorm, 4), SEQUENCE),
    "layer norm, vector, no bias": (partial(nn.LayerNorm, 4, bias=False), VECTOR),
    "layer norm, no weights": (partial(and_linear, partial(nn.LayerNorm, 4, elementwise_affine=False)), SEQUENCE),
    "rms norm, sequence": (partial(nn.RMSNorm, 4), SEQUENCE),
    "embedding": (partial(nn.Embedding, 9, 4), WORDS),
    "token embedding": (partial(TokenEmbedding, 9, 4), WORDS),
    "positions": (partial(PositionEmbedding, 8, 4), SEQUENCE),
    "towards group norm": (lambda: LearnedNorm(GroupNorm(1, 4)), IMAGE),
    "towards layer norm": (lambda: LearnedNorm(nn.LayerNorm(4)), SEQUENCE),
}


class BatchedAndSeparate:
    """The same layers batched and separate, each with its own weights, and input features."""

    def __init__(self, make: Make, shape: tuple[int, ...], count: int, entries: list[int] | None = None) -> None:
        self.layers = [build_on(CPU, make, generator_of(i)).double() for i in range(count)]
        for i, layer in enumerate(self.layers):
            add_noise(layer, seed=i)
            for number, buffer in enumerate(layer.buffers()):
                buffer.add_(i + number)
        self.index = RowIndex()
        self.batched = batch_layers(make(), self.index)
        self.weights = FlatWeights([Assignment(BatchedModule(self.batched), self.layers, range(count))])
        self.entries = list(range(count)) if entries is None else entries
        rows = (len(self.entries) * SAMPLES, *shape)
        if shape == WORDS:
            self.x = torch.randint(9, rows, generator=generator_of(7))
        else:
            self.x = torch.randn(rows, generator=generator_of(7), dtype=torch.float64, requires_grad=True)

    def batched_outputs(self) -> Tensor:  # [V·B, …], entry by entry
        y = self.batched(batch_inputs(self.x, len(self.entries)))
        assert y.ndim < 4 or y.is_contiguous(memory_format=memory_format()), "the memory format stays"
        return unbatch_outputs(y, len(self.entries), SAMPLES)

    def separate_outputs(self) -> Tensor:
        parts = self.x.chunk(len(self.entries))
        return torch.cat([self.layers[i](part) for i, part in zip(self.entries, parts, strict=True)])

    def assert_same_in_training(self) -> None:
        self.index.select_all(len(self.layers))
        self.weights.bind(requires_grad=True)
        found = []
        for answer in (self.batched_outputs, self.separate_outputs):
            y = answer()
            y.square().sum().backward()
            found.append((y, self.x.grad))
            self.x.grad = None
        close(*found)
        close(self.weights.grads, self.weights.gather([p.grad for p in self.weights.parameters]))
        for section in self.weights.sections:
            close(section.statistics, section.gather_statistics())


def memory_format() -> torch.memory_format:
    return torch.channels_last if layers.CHANNELS_LAST["cpu"] else torch.contiguous_format


@pytest.fixture(params=["cpu", "cuda"])
def as_on_each_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute on the CPU, with memory format and products of each type of device."""
    for choices in (layers.CHANNELS_LAST, MAX_PRODUCT_HOSTS):
        monkeypatch.setitem(choices, "cpu", choices[request.param])


@pytest.mark.thinned(5)
@pytest.mark.usefixtures("as_on_each_device")
@pytest.mark.parametrize("count", [1, 3, MAX_PRODUCT_HOSTS["cpu"] + 1])
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_gradients_and_statistics_are_those_of_each(layer: str, count: int) -> None:
    BatchedAndSeparate(*LAYERS[layer], count).assert_same_in_training()


@pytest.mark.thinned(5)
@pytest.mark.parametrize("entries", [[2, 0, 2], [1, 1, 0, 2, 2, 0, 1], [1]], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_in_evaluation_a_host_may_be_there_several_times(layer: str, entries: list[int]) -> None:
    pair = BatchedAndSeparate(*LAYERS[layer], 3, entries)
    for module in (pair.batched, *pair.layers):
        module.eval()
    with torch.inference_mode():
        pair.weights.bind(requires_grad=False)
        pair.index.select_rows(torch.tensor(entries))
        close(pair.batched_outputs(), pair.separate_outputs())


def test_the_words_are_judged_by_each_hosts_own_vectors() -> None:
    pair = BatchedAndSeparate(partial(TokenEmbedding, 9, 4), SEQUENCE, 3)
    pair.index.select_all(3)
    pair.weights.bind(requires_grad=True)

    alone = [layer.logits(part) for layer, part in zip(pair.layers, pair.x.chunk(3), strict=True)]
    close(pair.batched.logits(pair.x), torch.cat(alone))


SHAPES = {"image": (3, 4, 2), "sequence": (4, 3), "vector": (3,)}
"""Shapes of one sample: [C, H, W], [T, C], [C]."""


def entries_of(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return the part of each entry of a batched feature."""
    return (x if x.ndim != 4 else unbatch_outputs(x, count, len(x))).chunk(count)


@pytest.mark.usefixtures("as_on_each_device")
@pytest.mark.parametrize("shape", SHAPES)
@given(data=st.data())
def test_features_are_selected_distributed_and_merged_entry_by_entry(shape: str, data: st.DataObject) -> None:
    """Outputs and gradients are those of the same operations on the entries one by one."""
    count, samples = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    x = torch.randn((count * samples, *SHAPES[shape]), generator=generator_of(), requires_grad=True)
    own, batched = x.chunk(count), batch_inputs(x, count)
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=7))
    order = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    sizes, inverse = [len(part) for part in parts], sorted(range(count), key=order.__getitem__)
    numbers = torch.arange(1.0, count + 1)
    split_up = split(batched, sizes, torch.tensor(order))
    factor = {entry: i + 2 for i, part in enumerate(parts) for entry in part}  # each part has a different function
    changed = merge([part * (i + 2) for i, part in enumerate(split_up)], sizes, torch.tensor(inverse))
    cases = [
        (batched, own),
        (select_entries(batched, count, torch.tensor(chosen)), [own[i] for i in chosen]),
        (merge(split_up, sizes, torch.tensor(inverse)), own),
        (changed, [part * factor[i] for i, part in enumerate(own)]),
        (batched * broadcast_per_entry(numbers, batched), [part * n for part, n in zip(own, numbers, strict=True)]),
    ]
    for ours, theirs in cases:
        assert ours.ndim < 4 or ours.is_contiguous(memory_format=memory_format())
        found, expected = torch.cat(entries_of(ours, len(theirs))), torch.cat(list(theirs))
        weights = torch.arange(float(expected.numel())).view(expected.shape)
        gradients = [torch.autograd.grad((y * weights).sum(), x, retain_graph=True)[0] for y in (found, expected)]
        assert torch.equal(found, expected) and torch.equal(*gradients)
