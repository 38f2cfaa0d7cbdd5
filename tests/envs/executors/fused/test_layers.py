"""Each stacked layer, against the same number of separate layers."""

from collections.abc import Callable
from functools import partial
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.blueprints import build_on
from esper_lightning.blueprints.conv import GroupNorm
from esper_lightning.blueprints.residual import LearnedNorm
from esper_lightning.envs.executors.fused import stacking
from esper_lightning.envs.executors.fused.flat_params import Assignment, FlatParameters, StackedModule
from esper_lightning.envs.executors.fused.layers import MAX_BMM_HOSTS, STACKED_TYPES, stack_layers
from esper_lightning.envs.executors.fused.stacking import (
    StackIndex,
    columns_to_rows,
    rows_to_columns,
    stack_inputs,
    unstack_outputs,
)
from esper_lightning.envs.host_training import ConvolutionMethod
from esper_lightning.growth.blend import SampleGate
from esper_lightning.hosts.transformer import PositionEmbedding, TokenEmbedding
from tests.growth.grown import CPU, add_noise, generator_of

SAMPLES = 3

IMAGE, SEQUENCE, VECTOR = (4, 5, 5), (6, 4), (4,)
"""Shapes of one sample with 4 channels."""

WORDS = (6,)
"""Shape of one sample of indices."""

Make = Callable[[], nn.Module]


class Gated(nn.Module):
    """Module that multiplies a feature by its gate, so that gates are tested in use."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = SampleGate(4, channels)

    def forward(self, h: Tensor) -> Tensor:
        return h * self.gate(h)


def and_linear(make: Make) -> nn.Module:
    """Append a linear layer, whose weights show the gradient of a layer without weights."""
    return nn.Sequential(make(), nn.Linear(4, 2) if make.func is nn.LayerNorm else nn.Conv2d(4, 2, 1))


LAYERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "3x3": (partial(nn.Conv2d, 4, 6, 3, padding=1), IMAGE),
    "3x3, no bias": (partial(nn.Conv2d, 4, 6, 3, bias=False), IMAGE),
    "3x3, groups": (partial(nn.Conv2d, 4, 6, 3, groups=2), IMAGE),
    "3x3, strided and dilated": (partial(nn.Conv2d, 4, 6, 3, stride=2, padding=2, dilation=2), IMAGE),
    "3x1": (partial(nn.Conv2d, 4, 6, (3, 1), stride=(1, 2), padding=(2, 0)), IMAGE),
    "5x5": (partial(nn.Conv2d, 4, 6, 5, padding=2), IMAGE),
    "same": (partial(nn.Conv2d, 4, 6, 3, padding="same"), IMAGE),
    "1x1": (partial(nn.Conv2d, 4, 6, 1), IMAGE),
    "1x1, no bias": (partial(nn.Conv2d, 4, 6, 1, bias=False), IMAGE),
    "1x1, strided": (partial(nn.Conv2d, 4, 6, 1, stride=2), IMAGE),
    "1x1, depthwise": (partial(nn.Conv2d, 4, 4, 1, groups=4), IMAGE),
    "batch norm": (partial(nn.BatchNorm2d, 4), IMAGE),
    "batch norm, no weights": (partial(and_linear, partial(nn.BatchNorm2d, 4, affine=False)), IMAGE),
    "group norm": (partial(nn.GroupNorm, 2, 4), IMAGE),
    "our group norm": (partial(GroupNorm, 2, 4), IMAGE),
    "group norm, no weights": (partial(and_linear, partial(nn.GroupNorm, 2, 4, affine=False)), IMAGE),
    "linear, sequence": (partial(nn.Linear, 4, 6), SEQUENCE),
    "linear, vector": (partial(nn.Linear, 4, 6), VECTOR),
    "linear, vector, no bias": (partial(nn.Linear, 4, 6, bias=False), VECTOR),
    "layer norm, sequence": (partial(nn.LayerNorm, 4), SEQUENCE),
    "layer norm, vector, no bias": (partial(nn.LayerNorm, 4, bias=False), VECTOR),
    "layer norm, no weights": (partial(and_linear, partial(nn.LayerNorm, 4, elementwise_affine=False)), SEQUENCE),
    "rms norm, sequence": (partial(nn.RMSNorm, 4), SEQUENCE),
    "rms norm, vector": (partial(nn.RMSNorm, 4), VECTOR),
    "embedding": (partial(nn.Embedding, 9, 4), WORDS),
    "token embedding": (partial(TokenEmbedding, 9, 4), WORDS),
    "positions": (partial(PositionEmbedding, 8, 4), SEQUENCE),
    "towards group norm": (lambda: LearnedNorm(GroupNorm(1, 4)), IMAGE),
    "towards layer norm": (lambda: LearnedNorm(nn.LayerNorm(4)), SEQUENCE),
    "gate, image": (partial(Gated, 1), IMAGE),
    "gate, sequence": (partial(Gated, -1), SEQUENCE),
    "gate, vector": (partial(Gated, 1), VECTOR),
}

CONVOLUTIONS = [name for name, (make, _) in LAYERS.items() if type(make()) is nn.Conv2d]

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


class StackedAndSeparate:
    """The same layers stacked and separate, each with its own weights, and input features."""

    def __init__(
        self,
        make: Make,
        shape: tuple[int, ...],
        count: int,
        entries: list[int] | None = None,
        *,
        convolutions: ConvolutionMethod | None = None,
    ) -> None:
        self.layers = [build_on(CPU, make, generator_of(i)).double() for i in range(count)]
        for i, layer in enumerate(self.layers):
            add_noise(layer, seed=i)
            for number, buffer in enumerate(layer.buffers()):
                buffer.add_(i + number)
        self.stack_index = StackIndex(convolutions)
        self.stack = stack_layers(make(), self.stack_index)
        program = StackedModule(self.stack)
        self.weights = FlatParameters([Assignment(program, self.layers, range(count))])
        self.entries = list(range(count)) if entries is None else entries
        rows = (len(self.entries) * SAMPLES, *shape)
        if shape == WORDS:
            self.x = torch.randint(9, rows, generator=generator_of(7))
        else:
            self.x = torch.randn(rows, generator=generator_of(7), dtype=torch.float64, requires_grad=True)

    def stacked_outputs(self, columns: bool = False) -> Tensor:  # [V·B, …], entry by entry
        """Return the stack's outputs; with `columns`, inputs are laid out like flattened images."""
        count = len(self.entries)
        x = rows_to_columns(self.x, count) if columns else stack_inputs(self.x, count)
        y = self.stack(x)
        return columns_to_rows(y, count) if columns else unstack_outputs(y, count, SAMPLES)

    def separate_outputs(self) -> Tensor:
        parts = self.x.chunk(len(self.entries))
        return torch.cat([self.layers[i](part) for i, part in zip(self.entries, parts, strict=True)])


def assert_same_in_training(pair: StackedAndSeparate, columns: bool = False) -> None:
    pair.stack_index.select_all(len(pair.layers))
    pair.weights.bind(requires_grad=True)
    found = []
    for answer in (lambda: pair.stacked_outputs(columns), pair.separate_outputs):
        y = answer()
        y.square().sum().backward()
        found.append((y, pair.x.grad))
        pair.x.grad = None
    alone = [p.grad for p in pair.weights.parameters]

    close(*found)
    if alone:
        close(pair.weights.grads, pair.weights.gather(alone))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("count", [1, 2, MAX_BMM_HOSTS["cpu"], MAX_BMM_HOSTS["cpu"] + 1])
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_gradients_and_statistics_are_those_of_each(layer: str, count: int) -> None:
    pair = StackedAndSeparate(*LAYERS[layer], count)
    assert_same_in_training(pair)

    for section in pair.weights.sections:
        for buffer in section.assignment.buffers():
            close(getattr(buffer.layer, buffer.name), buffer.gather())


@pytest.mark.parametrize("layer", [name for name, (_, shape) in LAYERS.items() if shape == IMAGE])
def test_with_the_memory_format_and_the_products_of_a_gpu_results_are_the_same(
    layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stacking.CHANNELS_LAST, "cpu", stacking.CHANNELS_LAST["cuda"])
    monkeypatch.setitem(MAX_BMM_HOSTS, "cpu", MAX_BMM_HOSTS["cuda"])
    pair = StackedAndSeparate(*LAYERS[layer], 3)
    pair.stack_index.select_all(3)
    pair.weights.bind(requires_grad=True)
    features = stack_inputs(pair.x, 3)

    assert features.is_contiguous()
    assert pair.stack(features).is_contiguous()
    assert_same_in_training(StackedAndSeparate(*LAYERS[layer], 3))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("method", get_args(ConvolutionMethod))
@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_either_method_of_convolution_gives_the_outputs_and_gradients_of_each(
    layer: str, method: ConvolutionMethod, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory format is that of the type of device."""
    monkeypatch.setitem(stacking.CHANNELS_LAST, "cpu", stacking.CHANNELS_LAST[device_type])

    assert_same_in_training(StackedAndSeparate(*LAYERS[layer], 3, convolutions=method))


@pytest.mark.parametrize(
    ("method", "layer", "count", "convolutions"),
    [
        (None, "1x1", MAX_BMM_HOSTS["cpu"], 0),
        (None, "1x1", MAX_BMM_HOSTS["cpu"] + 1, 1),
        (None, "3x3", 2, 1),
        ("grouped", "1x1", 2, 1),
        ("products", "1x1", MAX_BMM_HOSTS["cpu"] + 1, 0),
        ("products", "3x3", 2, 0),
        ("products", "3x3", 1, 1),
        ("products", "3x3, groups", 2, 1),
        ("products", "same", 2, 1),
    ],
)
def test_the_method_and_the_layer_decide_whether_it_is_a_convolution_or_a_product(
    method: ConvolutionMethod | None, layer: str, count: int, convolutions: int
) -> None:
    pair = StackedAndSeparate(*LAYERS[layer], count, convolutions=method)
    pair.stack_index.select_all(count)
    pair.weights.bind(requires_grad=True)
    with patch("torch.nn.functional.conv2d", wraps=torch.nn.functional.conv2d) as convolve:
        pair.stacked_outputs()

    assert convolve.call_count == convolutions


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_products_compute_in_half_precision_where_convolutions_do(
    device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stacking.CHANNELS_LAST, "cpu", stacking.CHANNELS_LAST[device_type])
    found = []
    for method in get_args(ConvolutionMethod):
        index = StackIndex(method)
        index.select_all(2)
        layer = stack_layers(nn.Conv2d(4, 6, 3), index)
        draw = generator_of(0)
        layer.bound = {"weight": torch.randn(2, 6, 4, 3, 3, generator=draw), "bias": torch.randn(2, 6, generator=draw)}
        with torch.autocast("cpu", torch.bfloat16):
            found.append(layer(torch.randn(3, 2 * 4, 5, 5, generator=draw)))

    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
    assert found[1].dtype is torch.bfloat16


@pytest.mark.parametrize("layer", ["linear, vector", "linear, vector, no bias", "layer norm, vector, no bias"])
def test_what_an_image_left_side_by_side_stays_so(layer: str) -> None:
    assert_same_in_training(StackedAndSeparate(*LAYERS[layer], 3), columns=True)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("entries", [[2, 0, 2], [1, 1, 0, 2, 2, 0, 1], [1]], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_in_evaluation_a_host_may_be_there_several_times(layer: str, entries: list[int]) -> None:
    pair = StackedAndSeparate(*LAYERS[layer], 3, entries)
    for module in (pair.stack, *pair.layers):
        module.eval()
    with torch.inference_mode():
        pair.weights.bind(requires_grad=False)
        pair.stack_index.select_rows(torch.tensor(entries))
        close(pair.stacked_outputs(), pair.separate_outputs())


@pytest.mark.parametrize("count", [1, 3])
def test_the_words_are_judged_by_each_hosts_own_vectors(count: int) -> None:
    pair = StackedAndSeparate(partial(TokenEmbedding, 9, 4), SEQUENCE, count)
    pair.stack_index.select_all(count)
    pair.weights.bind(requires_grad=True)
    alone = torch.cat([layer.logits(part) for layer, part in zip(pair.layers, pair.x.chunk(count), strict=True)])

    close(pair.stack.logits(pair.x), alone)


def test_all_kinds_of_layers_were_tried() -> None:
    assert {type(module) for make, _ in LAYERS.values() for module in make().modules()} >= set(STACKED_TYPES)
