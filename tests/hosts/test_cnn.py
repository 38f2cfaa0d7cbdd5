"""The convolutional host."""

from typing import Any

import pytest
import torch

from esper_lightning.blueprints import build_on, initialise
from esper_lightning.growth.lifecycle import count_parameters, slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.growth.grown import grow

ALL = ["block1", "block1.pool", "block2", "block2.pool", "block3", "block3.pool"]


def built(input_shape: tuple[int, ...] = (3, 32, 32), **options: Any) -> CNN:
    return build_on(torch.device("cpu"), lambda: CNN(input_shape, 10, **options), torch.Generator().manual_seed(0))


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("input_shape", "options", "parameters"),
    [
        ((3, 32, 32), {}, 6_418),
        ((3, 32, 32), {"base": 32}, 94_762),
        ((3, 32, 32), {"base": 2, "kernel": 1, "pools": 0}, 164),
        ((3, 32, 32), {"base": 1, "kernel": 1}, 77),
        ((1, 8, 8), {"base": 4, "kernel": 1, "pools": 2}, 390),
        ((1, 8, 8), {"widths": [4, 4, 8], "kernel": 1, "pools": 2, "residual": True}, 210),
        ((1, 8, 8), {"widths": [4, 4, 8], "kernel": 1, "pools": 2, "residual": True, "norm": False}, 194),
    ],
)
def test_the_number_of_parameters_is_pinned(
    input_shape: tuple[int, ...], options: dict[str, Any], parameters: int
) -> None:
    assert count_parameters(CNN(input_shape, 10, **options)) == parameters
    assert count_parameters(CNN(input_shape, 10, **options, slots=[])) == parameters  # slots have no parameters


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({}, ["block1.pool", "block2.pool", "block3.pool"]),
        ({"pools": 0}, ["block1", "block2", "block3"]),
        ({"pools": 2}, ["block1.pool", "block2.pool", "block3"]),
        ({"blocks": 1}, ["block1.pool"]),
        ({"slots": []}, []),
        ({"slots": ["block3", "block1.pool", "block2", "block1"]}, ["block1", "block1.pool", "block2", "block3"]),
        ({"slots": ALL[::-1]}, ALL),
    ],
)
def test_slots_are_in_the_order_of_the_forward_pass(options: dict[str, Any], slots: list[str]) -> None:
    assert list(slots_of(CNN((3, 32, 32), 10, **options))) == slots


def test_the_tenth_block_comes_after_the_second() -> None:
    slots = ["block10", "block2", "block1"]
    network = CNN((1, 4, 4), 10, base=1, blocks=10, kernel=1, pools=0, slots=slots)
    assert list(slots_of(network)) == ["block1", "block2", "block10"]


def test_a_slot_sees_the_feature_before_or_behind_its_pool() -> None:
    network, seen = built(slots=ALL), []
    for slot in slots_of(network).values():
        slot.register_forward_hook(lambda slot, inputs, _: seen.append((slot.name, slot.width, *inputs[0].shape[1:])))
    network(images(2, 3, 32, 32))
    assert seen == [
        ("block1", 8, 8, 32, 32),
        ("block1.pool", 8, 8, 16, 16),
        ("block2", 16, 16, 16, 16),
        ("block2.pool", 16, 16, 8, 8),
        ("block3", 32, 32, 8, 8),
        ("block3.pool", 32, 32, 4, 4),
    ]


def test_only_the_first_blocks_are_pooled_when_told_so() -> None:
    network, seen = built(pools=1, slots=["block1.pool", "block3"]), []
    for slot in slots_of(network).values():
        slot.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[-1]))
    network(images(2, 3, 32, 32))
    assert seen == [16, 16]


def test_a_pool_keeps_the_largest_of_four() -> None:
    network, seen = built(slots=["block1", "block1.pool"]), []
    for slot in slots_of(network).values():
        slot.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    network(images(2, 3, 32, 32))
    before, behind = seen
    assert (before >= 0).all()  # ReLU
    assert torch.equal(behind[0, 3, 5, 2], before[0, 3, 10:12, 4:6].max())


@pytest.mark.parametrize("input_shape", [(3, 32, 32), (1, 8, 8), (2, 9, 17)])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_images_of_any_size_become_one_number_for_each_class(input_shape: tuple[int, ...], kernel: int) -> None:
    assert built(input_shape, kernel=kernel)(images(4, *input_shape)).shape == (4, 10)


def test_empty_slots_change_neither_the_weights_nor_the_outputs() -> None:
    x = images(4, 3, 32, 32)
    assert torch.equal(built(slots=ALL)(x), built(slots=[])(x))


FORMATS = {False: torch.contiguous_format, True: torch.channels_last}


@pytest.mark.parametrize("input_shape", [(3, 32, 32), (1, 8, 8)])
@pytest.mark.parametrize("channels_last", FORMATS)
def test_features_and_seeds_have_the_hosts_memory_format(input_shape: tuple[int, ...], channels_last: bool) -> None:
    network, seen = built(input_shape, slots=ALL, channels_last=channels_last), []
    for slot in slots_of(network).values():
        grow(slot, Stage.BLENDING, "bottleneck")
        for module in (slot, *slot.seed.modules()):
            module.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0], output]))
    network(images(4, *input_shape))
    seen = [x for x in seen if min(x.shape[2:]) > 1]  # images of one pixel have either format
    assert len(seen) > 40
    assert all(x.is_contiguous(memory_format=FORMATS[channels_last]) for x in seen)
    assert not any(x.is_contiguous(memory_format=FORMATS[not channels_last]) for x in seen)


@pytest.mark.parametrize("input_shape", [(3, 32, 32), (1, 8, 8)])
def test_the_memory_format_changes_nothing_but_rounding(input_shape: tuple[int, ...]) -> None:
    losses, gradients = [], []
    for channels_last in FORMATS:
        network = built(input_shape, channels_last=channels_last).double()
        network(images(4, *input_shape).double()).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in network.named_parameters()})
        losses.append(network.eval()(images(4, *input_shape).double()))  # normalised by the running statistics
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


def test_first_weights_do_not_depend_on_the_memory_format() -> None:
    network, other = built(channels_last=True), built(channels_last=False)
    for _ in range(2):  # a host that is used again starts with the same weights
        assert all(torch.equal(a, b) for a, b in zip(network.parameters(), other.parameters(), strict=True))
        network(images(4, 3, 32, 32)).sum().backward()
        initialise(network, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("isolate", "expected"), [(None, True), (True, True), (False, False)])
def test_slots_isolate_as_the_host_is_told(isolate: bool | None, expected: bool) -> None:
    assert {slot.detach_input for slot in slots_of(CNN((1, 8, 8), 10, isolate=isolate)).values()} == {expected}


@pytest.mark.parametrize(
    ("input_shape", "options", "message"),
    [
        ((64,), {}, r"needs images of shape \(C, H, W\), the task gives \(64,\)"),
        ((8, 8), {}, r"needs images of shape \(C, H, W\), the task gives \(8, 8\)"),
        ((3, 32, 32), {"base": 0}, "base, blocks and kernel must be positive, got 0, 3, 3"),
        ((3, 32, 32), {"blocks": 0}, "base, blocks and kernel must be positive, got 8, 0, 3"),
        ((3, 32, 32), {"blocks": 10**9, "pools": 0}, "blocks must be at most 1000, got 1000000000"),
        ((3, 32, 32), {"blocks": 1000, "pools": 0}, "width must be at most 1048576, got "),
        ((3, 32, 32), {"kernel": 10**9 + 1}, "kernel must be at most 1000, got 1000000001"),
        ((3, 32, 32), {"kernel": -1}, "base, blocks and kernel must be positive, got 8, 3, -1"),
        ((3, 32, 32), {"kernel": 2}, "kernel must be odd to keep the image's size, got 2"),
        ((3, 32, 32), {"pools": 4}, "pools must lie between 0 and blocks = 3, got 4"),
        ((3, 32, 32), {"pools": -1}, "pools must lie between 0 and blocks = 3, got -1"),
        ((3, 32, 7), {}, r"3 pools need images of at least 8 pixels, got \(32, 7\)"),
        ((3, 32, 32), {"slots": ["block4"]}, "unknown slot 'block4'; did you mean 'block"),
        ((3, 32, 32), {"slots": ["block3.pool"], "pools": 2}, r"unknown slot 'block3\.pool'; did you mean 'block"),
        ((3, 32, 32), {"slots": ["block1", "block1"]}, "slot 'block1' is named twice"),
    ],
)
def test_a_host_that_cannot_be_built_says_why(
    input_shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CNN(input_shape, 10, **options)


def test_a_residual_block_adds_its_input_before_the_relu() -> None:
    network = built((1, 8, 8), widths=[2, 2], kernel=1, pools=0, slots=[], residual=True).eval()
    assert network.shortcuts is not None
    x = images(4, 1, 8, 8)

    first = torch.relu(network.norms[0](network.convs[0](x)) + network.shortcuts[0](x))
    second = torch.relu(network.norms[1](network.convs[1](first)) + first)

    torch.testing.assert_close(network(x), network.head(second.mean((2, 3))))
