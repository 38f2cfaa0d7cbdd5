"""The fully connected host."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from esper_lightning.blueprints import build_on
from esper_lightning.growth.alpha import Ramp
from esper_lightning.growth.lifecycle import count_parameters, slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import MLP
from tests.growth.grown import grow
from tests.hosts.variants import check_leave_one_out


def built(**options: Any) -> MLP:
    options = {"width": 16, "layers": 3} | options
    return build_on(torch.device("cpu"), lambda: MLP((1, 4, 4), 10, **options), torch.Generator().manual_seed(0))


def images(samples: int = 6) -> Tensor:  # [B, 1, 4, 4]
    return torch.randn(samples, 1, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("input_shape", "options", "parameters"),
    [
        ((1, 8, 8), {}, 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10),
        ((784,), {"layers": 1}, 784 * 128 + 128 + 128 * 10 + 10),
        ((3,), {"width": 2, "layers": 3}, 3 * 2 + 2 + 2 * (2 * 2 + 2) + 2 * 10 + 10),
    ],
)
def test_the_number_of_parameters_is_pinned(
    input_shape: tuple[int, ...], options: dict[str, Any], parameters: int
) -> None:
    assert count_parameters(MLP(input_shape, 10, **options)) == parameters
    assert count_parameters(MLP(input_shape, 10, **options, slots=[])) == parameters  # slots have no parameters


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({}, ["layer1", "layer2", "layer3"]),
        ({"slots": []}, []),
        ({"slots": ["layer3", "layer1"]}, ["layer1", "layer3"]),
        ({"layers": 10, "slots": ["layer10", "layer2"]}, ["layer2", "layer10"]),
    ],
)
def test_slots_are_in_the_order_of_the_forward_pass(options: dict[str, Any], slots: list[str]) -> None:
    assert list(slots_of(built(**options))) == slots


def test_a_slot_sees_its_layers_output_behind_the_relu() -> None:
    network, seen = built(slots=["layer2"]), []
    slot = slots_of(network)["layer2"]
    slot.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    x = images()
    network(x)
    first, second, _ = network.layers
    torch.testing.assert_close(seen[0], second(first(x.flatten(1)).clamp(min=0)).clamp(min=0))
    assert (slot.layout, slot.width) == ("vector", 16)


def test_inputs_of_any_shape_become_one_number_for_each_class() -> None:
    for shape in [(5,), (3, 4), (2, 3, 4)]:
        assert MLP(shape, 7)(torch.randn(2, *shape)).shape == (2, 7)


def test_empty_slots_change_neither_the_weights_nor_the_outputs() -> None:
    assert torch.equal(built()(images()), built(slots=[])(images()))


@pytest.mark.parametrize(("isolate", "expected"), [(None, False), (True, True), (False, False)])
def test_slots_isolate_as_the_host_is_told(isolate: bool | None, expected: bool) -> None:
    assert {slot.detach_input for slot in slots_of(built(isolate=isolate)).values()} == {expected}


def test_a_few_steps_of_training_fit_a_batch() -> None:
    network, x, classes = built(), images(16), torch.arange(16) % 10
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(network(x), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_leaving_out_one_seed_at_a_time_equals_plain_passes() -> None:
    network = built()
    grow(slots_of(network)["layer1"], Stage.PROBATIONARY, "mlp_small", Ramp(0.0, 0.5, 1, "linear"))
    grow(slots_of(network)["layer2"], Stage.FOSSILIZED, "gated")
    grow(slots_of(network)["layer3"], Stage.BLENDING, "norm", Ramp(0.0, 1.0, 4, "linear"))
    check_leave_one_out(network, images())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width and layers must be positive, got 0, 3"),
        ({"layers": 0}, "width and layers must be positive, got 16, 0"),
        ({"layers": 10**9}, "layers must be at most 1000, got 1000000000"),
        ({"width": 10**30}, "width must be at most 1048576, got 10000"),
        ({"slots": ["layer4"]}, "unknown slot 'layer4'; did you mean 'layer"),
        ({"slots": ["layer1", "layer1"]}, "slot 'layer1' is named twice"),
    ],
)
def test_a_host_that_cannot_be_built_says_why(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(**options)
