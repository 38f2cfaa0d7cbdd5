"""Slots put behind any module by hooks: what they see, what they leave alone, how they go away, what is refused."""

import io
import pickle
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import attach_known, attach_slots, attachments, detach_slots
from esper_lightning.growth.growing import GrowingNetwork
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import TinyHost, grow, seeded

WIDTH = 6


def small_network() -> nn.Sequential:
    """Every layout but one: image behind `0` to `3`, vector behind `4` to `6`; 2 classes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, 2),
        )


def images(samples: int = 4) -> Tensor:
    return torch.randn(samples, 3, 8, 8, generator=seeded(3))


def grown_network() -> nn.Sequential:
    """With fossils behind the activation and behind the hidden layer; in evaluation mode."""
    network = small_network()
    slots = attach_slots(network, ["2", "5"], images())
    grow(slots["2"], Stage.FOSSILIZED, "conv_light")
    grow(slots["5"], Stage.FOSSILIZED, "mlp_small")
    return network.eval()


class Residual(nn.Module):
    """x + body(x), and a way out that ends nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.aside = nn.Linear(WIDTH, 4)
        self.never = nn.Linear(WIDTH, 4)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, 5] -> [B, 3]
        x = self.stem(x)
        self.aside(x)
        return self.head(x + self.body(x))


class Twice(nn.Module):
    """One layer that the data meets two times."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, 5] -> [B, 3]
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


class Calls(nn.Module):
    """Calls a function of its one layer."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.layer, x)


class Argmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


def test_names_may_come_in_any_order_and_slots_come_in_the_datas() -> None:
    slots = attach_slots(small_network(), ["6", "0", "3"], images())
    assert list(slots) == ["0", "3", "6"]
    assert [(slot.layout, slot.width) for slot in slots.values()] == [("image", WIDTH), ("image", WIDTH), ("vector", 2)]


def test_a_slot_sees_what_its_module_gives_and_the_next_module_sees_the_slot() -> None:
    network, x = small_network().eval(), images()
    behind_relu, behind_linear = network[:3](x), network[3:6](network[:3](x))
    slots = attach_slots(network, ["2", "5"], x)
    seen: dict[str, Tensor] = {}
    for name, slot in slots.items():
        slot.register_forward_hook(lambda _, inputs, __, name=name: seen.update({name: inputs[0]}))
    network(x)
    assert torch.equal(seen["2"], behind_relu)
    assert torch.equal(seen["5"], behind_linear)

    grow(slots["2"], Stage.FOSSILIZED, "conv_light")
    outputs = network(x)
    plain = small_network().eval()
    torch.testing.assert_close(outputs, plain[3:](slots["2"].seed(plain[:3](x))))


def test_seeds_isolate_as_the_layout_suggests_or_as_told() -> None:
    assert [slot.isolate for slot in attach_slots(small_network(), ["0", "5"], images()).values()] == [True, False]
    for isolate in (True, False):
        slots = attach_slots(small_network(), ["0", "5"], images(), isolate)
        assert [slot.isolate for slot in slots.values()] == [isolate, isolate]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_slot_has_the_precision_of_its_feature(dtype: torch.dtype) -> None:
    network = small_network().to(dtype)
    slot = attach_slots(network, ["0"], images().to(dtype))["0"]
    grow(slot, Stage.FOSSILIZED, "conv_light")
    assert {slot.alpha.dtype, *(p.dtype for p in slot.seed.parameters())} == {dtype}
    assert network(images().to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    "example", [(images(),), {"x": images()}, {"x": images(), "scale": 2.0}, (images(), 2.0)], ids=["", "x", "xs", "ps"]
)
def test_an_example_may_be_positional_or_keyword_arguments(example: tuple[Any, ...] | dict[str, Any]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_network()

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return scale * self.inner(x)

    assert attach_slots(Scaled(), ["inner.0"], example)["inner.0"].width == WIDTH


def test_attaching_again_adds_slots_and_leaves_what_grew() -> None:
    network = small_network().eval()
    first = attach_slots(network, ["2"], images())["2"]
    grow(first, Stage.FOSSILIZED, "conv_light")
    before = network(images())
    both = attach_slots(network, ["5"], images())
    assert list(both) == list(slots_of(network)) == ["2", "5"]
    assert both["2"] is first
    assert first.stage is Stage.FOSSILIZED
    assert torch.equal(network(images()), before)
    detach_slots(network)
    assert list(network.state_dict()) == list(small_network().state_dict())


def test_a_host_with_slots_of_its_own_gets_more() -> None:
    host = TinyHost("vector")
    slots = attach_slots(host, ["layers.1"], torch.randn(3, 5))
    assert list(slots) == ["first", "second", "layers.1"]
    detach_slots(host)
    assert list(slots_of(host)) == ["first", "second"]


@pytest.mark.parametrize(
    ("place", "trunk"), [("stem", True), ("body", False), ("body.0", False), ("aside", False), ("head", True)]
)
def test_the_trunk_is_where_all_data_passes(place: str, trunk: bool) -> None:
    assert attach_slots(Residual(), [place], torch.randn(3, 5))[place].trunk is trunk


def test_a_module_that_is_called_twice_has_one_slot_at_both_places_and_is_no_trunk() -> None:
    network, x = Twice(), torch.randn(4, 5, generator=seeded())
    slot = attach_slots(network, ["shared"], x)["shared"]
    assert not slot.trunk
    grow(slot, Stage.FOSSILIZED, "lora")
    layer, seed = network.shared, slot.seed
    detach_slots(network)
    expected = network.head(torch.tanh(seed(layer(torch.tanh(seed(layer(x)))))))
    attach_slots(network, ["shared"], x)
    slots_of(network)["shared"].seed, slots_of(network)["shared"].stage = seed, Stage.FOSSILIZED
    torch.testing.assert_close(network(x), expected)


def test_attaching_leaves_modes_statistics_and_gradients_alone() -> None:
    network = small_network()
    network[1].eval()  # a frozen normalisation, as in fine-tuning
    modes = {name: module.training for name, module in network.named_modules()}
    state = deepcopy(network.state_dict())
    slots = attach_slots(network, ["1", "5"], images())
    assert {name: module.training for name, module in network.named_modules() if name in modes} == modes
    assert all(slot.training for slot in slots.values())
    assert all(torch.equal(network.state_dict()[key], value) for key, value in state.items())
    assert all(p.grad is None for p in network.parameters())
    assert not any(slot.training for slot in attach_slots(network.eval(), ["0"], images()).values() if slot.name == "0")


def test_each_named_module_gets_one_hook_and_others_none() -> None:
    network = small_network()
    attach_slots(network, ["2", "5"], images())
    assert [len(module._forward_hooks) for module in network[:7]] == [0, 0, 1, 0, 0, 1, 0]
    detach_slots(network)
    assert not any(module._forward_hooks for module in network.modules())


def test_other_hooks_stay_and_see_what_grew() -> None:
    network, seen = small_network().eval(), []
    network[2].register_forward_hook(lambda _, __, output: seen.append(output))
    attach_slots(network, ["2"], images())
    network[2].register_forward_hook(lambda _, __, output: seen.append(output))
    grow(slots_of(network)["2"], Stage.FOSSILIZED, "conv_light")
    seen.clear()
    network(images())
    before, after = seen
    assert torch.equal(slots_of(network)["2"].seed(before), after)
    detach_slots(network)
    assert len(network[2]._forward_hooks) == 2


def test_detaching_leaves_room_to_attach_again() -> None:
    network = grown_network()
    detach_slots(network)
    plain = small_network().eval()
    assert torch.equal(network(images()), plain(images()))
    slots = attach_slots(network, ["2"], images())
    assert slots["2"].stage is Stage.DORMANT


def test_a_weight_file_from_before_fits_a_network_with_empty_slots() -> None:
    network = small_network()
    before = deepcopy(network.state_dict())
    attach_slots(network, ["2", "5"], images())
    network.load_state_dict(before, strict=True)


def through_a_file(network: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deep copy": deepcopy,
    "pickle": lambda network: pickle.loads(pickle.dumps(network)),
    "torch.save": through_a_file,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=list(COPIES))
def test_a_copy_grows_in_its_own_slots(copied: Callable[[nn.Module], nn.Module]) -> None:
    network = grown_network()
    before = network(images())
    twin = copied(network)
    assert torch.equal(twin(images()), before)
    slots_of(twin)["2"].empty()
    changed = twin(images())
    assert not torch.allclose(changed, before)
    assert torch.equal(network(images()), before)
    detach_slots(twin)
    assert torch.equal(twin(images()), small_network().eval()(images()))
    assert torch.equal(network(images()), before)
    assert [place["slot"] for place in attachments(network)] == ["2", "5"]


def test_a_sequential_network_goes_on_with_a_slot_behind_its_last_layer() -> None:
    network = small_network().eval()
    plain = network(images())
    slot = attach_slots(network, ["6"], images())["6"]
    assert torch.equal(network(images()), plain)
    grow(slot, Stage.FOSSILIZED, "lora")
    torch.testing.assert_close(network(images()), slot.seed(plain))


def test_a_compiled_network_says_the_same_while_seeds_come_and_go() -> None:
    network = grown_network()
    compiled = torch.compile(network, backend="eager")
    torch.testing.assert_close(compiled(images()), network(images()), rtol=0.0, atol=0.0)
    slots_of(network)["2"].empty()
    torch.testing.assert_close(compiled(images()), network(images()), rtol=0.0, atol=0.0)
    grow(slots_of(network)["2"], Stage.FOSSILIZED, "conv_heavy")
    torch.testing.assert_close(compiled(images()), network(images()), rtol=0.0, atol=0.0)
    detach_slots(network)


def test_where_slots_are_is_enough_to_attach_them_again() -> None:
    network, bare = grown_network(), small_network().eval()
    attach_known(bare, attachments(network))
    assert attachments(bare) == attachments(network)
    assert list(slots_of(bare)) == list(slots_of(network))
    assert torch.equal(bare(images()), small_network().eval()(images()))
    assert attachments(small_network()) == []


def test_seeds_learn_at_attached_slots_while_the_host_learns_as_if_alone() -> None:
    plain, network = small_network(), small_network()
    attach_slots(network, ["2", "5"], images())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    growing = GrowingNetwork(network, optimizer, horizon=5, generator=seeded())
    growing.germinate("2", "conv_light")
    growing.germinate("5", "lora")
    seeds = {name: [p.clone() for p in slot.seed.parameters()] for name, slot in growing.slots.items()}
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    for each, optimize in ((plain, alone), (network, optimizer)):
        optimize.zero_grad()
        each(images()).square().sum().backward()
        optimize.step()
    state = network.state_dict()
    assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
    for name, before in seeds.items():
        after = list(growing.slots[name].seed.parameters())
        assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("name", ["keys", "values", "places", "handles"])
def test_a_module_may_have_any_name(name: str) -> None:
    network, x = small_network(), images()
    network.add_module(name, nn.Linear(2, 2))
    assert attach_slots(network, [name], x)[name].width == 2


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


def assert_untouched(network: nn.Module) -> None:
    assert slots_of(network) == {}
    assert attachments(network) == []
    assert not any(module._forward_hooks for module in network.modules())


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
    with pytest.raises(ValueError, match="module 'layer' runs several times, on features of different shapes"):
        attach_slots(network, ["layer"], images())
    assert_untouched(network)


def test_there_is_nothing_to_detach_where_nothing_was_attached() -> None:
    for network in (small_network(), TinyHost("vector")):
        with pytest.raises(ValueError, match="the network has no attached slots; there is nothing to detach"):
            detach_slots(network)


def test_an_example_that_does_not_fit_leaves_the_network_as_it_was() -> None:
    network = small_network()
    with pytest.raises(RuntimeError, match="channels"):
        attach_slots(network, ["0"], torch.randn(2, 5, 8, 8))
    assert_untouched(network)
    assert all(module.training for module in network.modules())


class ChecksItsBatch(nn.Module):
    """Insists on the size of the batch in between, as attention does."""

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
    assert [slot.trunk for slot in slots.values()] == [False, True]


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
    before, story, state = network.eval()(images()), attachments(network), list(network.state_dict())
    with pytest.raises(error):
        attach_slots(network, names, example)
    assert torch.equal(network(images()), before)
    assert (attachments(network), list(network.state_dict())) == (story, state)
    assert [len(module._forward_hooks) for module in network[:7]] == [0, 0, 1, 0, 0, 0, 0]


def test_a_trial_that_fails_leaves_what_was_attached_before_and_grew() -> None:
    network, x = ChecksItsBatch(ZeroDivisionError), torch.randn(3, 5, generator=seeded())
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
    """An LSTM with time as its first axis, as torch's default is."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 5] -> [B, 3]
        return self.head(self.lstm(x.transpose(0, 1))[0].mean(0))


class BatchFirst(nn.Module):
    """An LSTM with the batch as its first axis; that of its state is the layers all the same."""

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


class LooksLast(nn.Module):
    """Keeps its channels in the last axis, between a convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.last, self.read = nn.Conv2d(3, WIDTH, 3), nn.Identity(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:  # [B, 3, H, W] -> [B, H - 2, W - 2, 2]
        return self.read(self.last(torch.tanh(self.see(x)).permute(0, 2, 3, 1)))


def test_a_seed_sees_channels_that_come_last_as_a_seed_of_images_does() -> None:
    network, x = LooksLast(), torch.randn(2, 3, 7, 9, generator=seeded())
    slots = attach_slots(network, ["last", "see"], x, channels_last=["last"])
    assert [(slot.layout, slot.width) for slot in slots.values()] == [("image", WIDTH)] * 2
    grow(slots["last"], Stage.FOSSILIZED, "conv_heavy")
    feature = torch.tanh(nn.functional.conv2d(x, network.see.weight, network.see.bias))
    expected = torch.einsum("bchw,oc->bhwo", slots["last"].seed(feature), network.read.weight) + network.read.bias
    torch.testing.assert_close(network(x), expected)


@pytest.mark.parametrize(
    ("names", "channels_last", "message"),
    [
        (["last"], ["lost"], r"channels_last names 'lost', which gets no slot; did you mean 'last'\?"),
        (["last"], ["see"], "channels_last names 'see', which gets no slot; there are: last"),
    ],
)
def test_channels_that_come_last_where_no_slot_is_are_refused(
    names: list[str], channels_last: list[str], message: str
) -> None:
    network = LooksLast()
    with pytest.raises(ValueError, match=f"^{message}$"):
        attach_slots(network, names, torch.randn(2, 3, 7, 9), channels_last=channels_last)
    assert_untouched(network)


def test_only_images_may_have_their_channels_last() -> None:
    network = small_network()
    with pytest.raises(
        ValueError, match=r"slot '5': .* \(4, 12\) is none of .* or, with channels_last, \[B, H, W, C\]"
    ):
        attach_slots(network, ["5"], images(), channels_last=["5"])
    assert_untouched(network)
