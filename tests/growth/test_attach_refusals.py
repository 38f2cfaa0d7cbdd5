"""Errors where no slot can be attached; the network is then unchanged."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import attach_slots, attachment_records, detach_slots
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.attached import WIDTH, Residual, assert_untouched, grown_network, images, small_network
from tests.growth.grown import TinyHost, generator_of, grow


class Calls(nn.Module):
    """Network that calls a given function with its only layer."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.layer, x)


class Argmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["head"], "the network has no module 'head'; there are: 0, 1, 2, 3, 4, 5, 6"),
        ([""], r"slot '': write a module's name, and keys in brackets as in lstm\[0\]"),
        (["0", "0"], "slot '0' is named twice; name each slot once"),
        ([], r"name at least one module, as a list of names; got \[\]"),
        ("0", "name at least one module, as a list of names; got '0'"),
    ],
)
def test_names_that_make_no_sense_are_refused_and_nothing_is_attached(names: list[str], message: str) -> None:
    network = small_network()
    with pytest.raises(ValueError, match=message):
        attach_slots(network, ["2", *names] if isinstance(names, list) and names else names, images())
    assert_untouched(network)


def test_a_mistyped_module_is_told_which_was_meant() -> None:
    with pytest.raises(ValueError, match=r"the network has no module 'body\.00'; did you mean 'body\.0'\?"):
        attach_slots(Residual(), ["body.00"], torch.randn(3, 5))
    with pytest.raises(ValueError, match=r"the network has no module 'heads'; did you mean 'head'\?"):
        attach_slots(Residual(), ["heads[0]"], torch.randn(3, 5))


def test_a_slot_that_is_there_already_is_refused() -> None:
    network = grown_network()
    with pytest.raises(ValueError, match="slot '2' is named twice"):
        attach_slots(network, ["2"], images())
    with pytest.raises(ValueError, match="slot 'first' is named twice"):
        attach_slots(nn.ModuleDict({"first": SeedSlot("first", "vector", 5)}), ["first"], images())


def test_a_module_that_does_not_run_is_refused() -> None:
    network = Residual()
    with pytest.raises(ValueError, match="module 'never' does not run when the network does; name one that is called"):
        attach_slots(network, ["stem", "never"], torch.randn(3, 5))
    assert_untouched(network)


@pytest.mark.parametrize(
    ("network", "example", "message"),
    [
        (nn.Sequential(Argmax()), torch.randn(3, 5), "gives Tensor, no floating-point tensor"),
        (nn.Sequential(nn.Conv3d(3, 4, 1)), torch.randn(2, 3, 4, 4, 4), r"shape \(2, 4, 4, 4, 4\) is none of"),
        (nn.Sequential(nn.Flatten(0)), torch.randn(2, 3), r"shape \(6,\) is none of \[B, C, H, W\], \[B, T, C\]"),
        (nn.Sequential(nn.Identity()), {"input": "text"}, "gives str, no floating-point tensor"),
    ],
    ids=["integers", "volumes", "numbers", "text"],
)
def test_what_is_no_feature_is_refused(network: nn.Module, example: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"slot '0': .*{message}"):
        attach_slots(network, ["0"], example)
    assert_untouched(network)


@pytest.mark.parametrize("name", ["lstm[2]", "lstm[1][2]", "lstm[hidden]"])
def test_brackets_that_lead_nowhere_are_refused(name: str) -> None:
    network = nn.ModuleDict({"lstm": nn.LSTM(5, WIDTH, batch_first=True)})
    network.forward = lambda x: network["lstm"](x)[0]
    with pytest.raises(ValueError, match=re.escape(f"slot {name!r}: the module's output has nothing at")):
        attach_slots(network, [name], torch.randn(3, 4, 5))
    assert_untouched(network)


def test_one_sample_is_no_example() -> None:
    network = small_network()
    with pytest.raises(ValueError, match="the example has one sample only; give at least two"):
        attach_slots(network, ["0"], images(1))
    assert_untouched(network)


def test_a_module_that_is_called_on_features_of_different_shapes_is_refused() -> None:
    network = Calls(nn.Conv2d(3, 3, 3), lambda layer, x: layer(layer(x)).mean((2, 3)))
    with pytest.raises(ValueError, match="module 'layer' runs again, on a feature of another shape"):
        attach_slots(network, ["layer"], images())
    assert_untouched(network)


def test_there_is_nothing_to_detach_where_nothing_was_attached() -> None:
    for network in (small_network(), TinyHost("vector")):
        with pytest.raises(ValueError, match="the network has no attached slots; there is nothing to detach"):
            detach_slots(network)
        with pytest.raises(ValueError, match="the network has no attached slots; there is nothing to detach"):
            detach_slots(network, ["2"])
        detach_slots(network, [])


def test_a_slot_that_is_not_attached_cannot_be_detached() -> None:
    network = small_network()
    attach_slots(network, ["0", "2"], images())
    with pytest.raises(ValueError, match="unknown slot '4'; there are: 0, 2"):
        detach_slots(network, ["0", "4"])
    assert [record["slot"] for record in attachment_records(network)] == ["0", "2"]


def test_an_example_that_does_not_fit_leaves_the_network_as_it_was() -> None:
    network = small_network()
    with pytest.raises(RuntimeError, match="channels"):
        attach_slots(network, ["0"], torch.randn(2, 5, 8, 8))
    assert_untouched(network)
    assert all(module.training for module in network.modules())


class ChecksItsBatch(nn.Module):
    """Network that raises an error if the batch size changes between its layers, as attention does."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        if len(hidden) != len(x):
            raise self.error("the batch has changed")
        return self.head(hidden)


@pytest.mark.parametrize(
    "error", [RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError, AttributeError]
)
def test_a_network_that_checks_its_batch_has_no_trunk_there(error: type[Exception]) -> None:
    slots = attach_slots(ChecksItsBatch(error), ["stem", "head"], torch.randn(3, 5))
    assert [slot.on_single_path for slot in slots.values()] == [False, True]


def test_a_trial_that_ends_in_something_else_leaves_the_network_as_it_was() -> None:
    network = ChecksItsBatch(ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        attach_slots(network, ["stem", "head"], torch.randn(3, 5))
    assert_untouched(network)
    assert all(module.training for module in network.modules())


@pytest.mark.parametrize("name", ["0[", "0[]", "0[1]x", "0]", "0[1", "[1]", "0[[1]]"])
def test_brackets_that_make_no_sense_are_refused(name: str) -> None:
    network = small_network()
    message = f"slot {name!r}: write a module's name, and keys in brackets as in lstm[0]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        attach_slots(network, ["2", name], images())
    assert_untouched(network)


@pytest.mark.parametrize(
    ("names", "example", "error"),
    [
        (["5", "2"], images(), ValueError),
        (["5", "nonsense"], images(), ValueError),
        (["5", "6[0]"], images(), ValueError),
        (["5"], images(1), ValueError),
        (["5"], torch.randn(2, 5, 8, 8), RuntimeError),
    ],
)
def test_a_refusal_leaves_what_was_attached_before_and_grew(
    names: list[str], example: Tensor, error: type[Exception]
) -> None:
    network = small_network()
    grow(attach_slots(network, ["2"], images())["2"], Stage.FOSSILIZED, "conv_light")
    before, story, state = network.eval()(images()), attachment_records(network), list(network.state_dict())
    with pytest.raises(error):
        attach_slots(network, names, example)
    assert torch.equal(network(images()), before)
    assert (attachment_records(network), list(network.state_dict())) == (story, state)
    assert [len(module._forward_hooks) for module in network[:7]] == [0, 0, 1, 0, 0, 0, 0]


def test_a_trial_that_fails_leaves_what_was_attached_before_and_grew() -> None:
    network, x = ChecksItsBatch(ZeroDivisionError), torch.randn(3, 5, generator=generator_of())
    slot = attach_slots(network, ["head"], x)["head"]
    grow(slot, Stage.FOSSILIZED, "lora")
    before = network(x)
    with pytest.raises(ZeroDivisionError):
        attach_slots(network, ["stem"], x)
    assert slots_of(network) == {"head": slot}
    assert torch.equal(network(x), before)
    assert not network.stem._forward_hooks
    detach_slots(network)
    assert_untouched(network)


class TimeFirst(nn.Module):
    """LSTM with time as the first axis, torch's default."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 5] -> [B, 3]
        return self.head(self.lstm(x.transpose(0, 1))[0].mean(0))


class BatchFirst(nn.Module):
    """LSTM with the batch as the first axis; the first axis of its state is still the layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, WIDTH, layers, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 5] -> [B, 3]
        return self.head(self.lstm(x)[1][0][-1])


@pytest.mark.parametrize("samples", [2, 3, 4])
@pytest.mark.parametrize(
    ("network", "name", "axes"),
    [
        (TimeFirst(), "lstm", (4, None, WIDTH)),
        (TimeFirst(), "lstm[0]", (4, None, WIDTH)),
        (TimeFirst(), "lstm[1][0]", (1, None, WIDTH)),
        (BatchFirst(1), "lstm[1][0]", (1, None, WIDTH)),
        (BatchFirst(2), "lstm[1][1]", (2, None, WIDTH)),
    ],
)
def test_a_feature_whose_first_axis_is_not_the_batch_is_refused(
    network: nn.Module, name: str, axes: tuple[int | None, ...], samples: int
) -> None:
    shape = tuple(axis or samples for axis in axes)
    message = (
        f"slot {name!r}: the first axis of the feature {shape} is not the batch's; seeds need [B, …] (of nn.LSTM: "
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        attach_slots(network, [name], torch.randn(samples, 4, 5))
    assert_untouched(network)
