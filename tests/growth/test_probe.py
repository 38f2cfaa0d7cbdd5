"""Gate G0 determines which blueprints fit which slots, and the reasons against the others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.blueprints import blueprint_names, build_on, registry
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.probe import probe_seeds
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.hosts import CNN
from tests.growth.grown import CPU, SLOTS, batch_of, generator_of, host_of, loss_of, loss_on, small_cnn

Register = Callable[[str, Callable[[int], nn.Module]], None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Register an image blueprint for the duration of a test."""
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))

    def add(name: str, build: Callable[[int], nn.Module]) -> None:
        def seed(channels: int) -> nn.Module:
            module = build(channels)
            module.start_as_identity = lambda: None  # any initial state is accepted as the identity
            return module

        registry.register(name, {"image"}, parameters=lambda c: 0, flops=lambda c, n: 0)(seed)

    return add


class ZeroGradientSeed(nn.Module):
    """Seed of the earlier system: a zeroed convolution followed by a normalisation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(1, channels)

    def initialise(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.conv.weight)
        nn.init.zeros_(self.norm.weight)  # blocks both passes, forward and backward
        nn.init.constant_(self.norm.bias, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Detour(nn.Module):
    """Host that reaches only one of its slots and gets no gradient from another."""

    def __init__(self) -> None:
        super().__init__()
        self.main = CNN((1, 8, 8), 10, base=4, slots=["block1"])
        self.unreached = SeedSlot("unreached", "image", 4)
        self.words = SeedSlot("words", "sequence", 4)
        self.muted = SeedSlot("muted", "image", 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) + 0.0 * self.muted(x).detach().sum()


def test_every_image_blueprint_can_grow_in_every_slot_of_a_cnn() -> None:
    reasons = probe_seeds(small_cnn(SLOTS), blueprint_names("image"), loss_of)
    assert reasons == {(slot, blueprint): [] for blueprint in blueprint_names("image") for slot in SLOTS}


@pytest.mark.parametrize("layout", ["sequence", "vector"])
def test_every_other_blueprint_can_grow_where_its_layout_is(layout: Layout) -> None:
    blueprints = blueprint_names(layout)
    reasons = probe_seeds(host_of(layout), blueprints, lambda network: loss_on(network, batch_of(layout)))
    assert reasons == {(slot, blueprint): [] for blueprint in blueprints for slot in ("first", "second")}


def test_a_seed_that_could_never_learn_is_found_out(register: Register) -> None:
    register("dead", ZeroGradientSeed)
    reasons = probe_seeds(small_cnn(), ["dead", "conv_light"], loss_of)
    for slot in slots_of(small_cnn()):
        assert reasons[slot, "dead"] == ["its first gradient is zero: it could never learn"]
        assert reasons[slot, "conv_light"] == []


def test_a_seed_that_changes_the_features_shape_is_found_out(register: Register) -> None:
    register("widen", lambda c: nn.Conv2d(c, c + 1, 1))
    register("shrink", lambda c: nn.Conv2d(c, c, 3))
    reasons = probe_seeds(small_cnn(["block1", "block2"]), ["widen", "shrink"], loss_of)
    change = "changes the feature's shape from"
    assert reasons == {
        ("block1", "widen"): [f"{change} (16, 4, 8, 8) to (16, 5, 8, 8)"],
        ("block2", "widen"): [f"{change} (16, 8, 4, 4) to (16, 9, 4, 4)"],
        ("block1", "shrink"): [f"{change} (16, 4, 8, 8) to (16, 4, 6, 6)"],
        ("block2", "shrink"): [f"{change} (16, 8, 4, 4) to (16, 8, 2, 2)"],
    }


def test_a_seed_may_fit_one_slot_and_not_another(register: Register) -> None:
    register("four", lambda c: nn.Conv2d(c, 4, 1))
    reasons = probe_seeds(small_cnn(["block1", "block2"]), ["four"], loss_of)
    assert reasons["block1", "four"] == []
    assert reasons["block2", "four"] == ["changes the feature's shape from (16, 8, 4, 4) to (16, 4, 4, 4)"]


def test_a_seed_without_parameters_is_found_out(register: Register) -> None:
    register("squash", lambda c: nn.Tanh())
    assert probe_seeds(small_cnn(["block1"]), ["squash"], loss_of) == {("block1", "squash"): ["has no parameters"]}


def test_a_seed_that_cannot_even_run_in_a_slot_is_found_out(register: Register) -> None:
    register("mirror", lambda c: nn.Conv2d(c, c, 3, padding=1, padding_mode="reflect"))
    reasons = probe_seeds(small_cnn(["block1", "block3.pool"]), ["mirror"], loss_of)
    assert reasons["block1", "mirror"] == []
    assert reasons["block3.pool", "mirror"] != []  # reflection padding needs more than one pixel


def test_slots_that_the_forward_pass_misses_and_other_layouts_are_named() -> None:
    host = build_on(CPU, Detour, generator_of())
    assert probe_seeds(host, ["conv_light"], loss_of) == {
        ("block1", "conv_light"): [],
        ("unreached", "conv_light"): ["the host's forward pass does not reach the slot"],
        ("words", "conv_light"): ["does not grow on sequence features on cpu"],
        ("muted", "conv_light"): ["its first gradient is zero: it could never learn"],
    }


def test_an_unknown_blueprint_ends_the_probe() -> None:
    with pytest.raises(ValueError, match="unknown blueprint 'conv_lite'; did you mean 'conv_light'"):
        probe_seeds(small_cnn(), ["conv_lite"], loss_of)


def test_the_probe_leaves_the_global_generator_alone_and_finds_the_same_each_time(register: Register) -> None:
    register("dead", ZeroGradientSeed)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = [probe_seeds(small_cnn(SLOTS), ["dead", "norm"], loss_of) for _ in range(2)]
    assert found[0] == found[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_host_that_answers_with_zero_at_first_is_no_reason_against_growth() -> None:
    host = small_cnn()
    nn.init.zeros_(host.head.weight)

    reasons = probe_seeds(host, ["norm", "conv_light"], loss_of)

    assert not any(reasons.values()), "its head learns from the first batch on, and passes gradients back from then"


def test_a_gate_that_stays_shut_is_one() -> None:
    class Shut(nn.Module):
        """Host whose second slot is multiplied by a constant 0, which training cannot change."""

        def __init__(self) -> None:
            super().__init__()
            self.body = small_cnn(slots=["block1"])
            self.behind = SeedSlot("behind", "vector", 10)
            self.gate = nn.Parameter(torch.zeros(()), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            answer = self.body(x)
            return answer + self.gate * self.behind(answer)

    reasons = probe_seeds(Shut(), ["norm"], loss_of)

    assert not reasons["block1", "norm"] and reasons["behind", "norm"]
