"""Gate G0 determines which blueprints fit which slots, and the reasons against the others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.growth.blueprints import blueprint_names, registry
from esper_lightning.growth.probe import probe_seeds
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.hosts import CNN
from tests.growth.grown import LAYOUTS, SLOTS, batch_of, host_of, loss_of, loss_on, small_cnn

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
    """Seed with a zeroed convolution followed by a normalisation."""

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
    """Host that reaches only some of its slots, gets no gradient from one and multiplies another by a constant 0."""

    def __init__(self) -> None:
        super().__init__()
        self.main = CNN((1, 8, 8), 10, base=4, slots=["block1"])
        self.unreached = SeedSlot("unreached", "image", 4)
        self.words = SeedSlot("words", "sequence", 4)
        self.muted = SeedSlot("muted", "image", 1)
        self.shut = SeedSlot("shut", "image", 1)
        self.gate = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) + 0.0 * self.muted(x).detach().sum() + self.gate * self.shut(x).mean()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_blueprint_can_grow_where_its_layout_is(layout: Layout) -> None:
    host = small_cnn(SLOTS) if layout == "image" else host_of(layout)
    slots, blueprints = SLOTS if layout == "image" else ["first", "second"], blueprint_names(layout)
    reasons = probe_seeds(host, blueprints, lambda network: loss_on(network, batch_of(layout)))
    assert reasons == {(slot, blueprint): [] for blueprint in blueprints for slot in slots}


CHANGE = "changes the feature's shape from"


@pytest.mark.parametrize(
    ("build", "block1", "block3"),
    [
        (ZeroGradientSeed, ["its first gradient is zero: it could never learn"], None),
        (lambda c: nn.Tanh(), ["has no parameters"], None),
        (lambda c: nn.Conv2d(c, c + 1, 1), [f"{CHANGE} (16, 4, 8, 8) to (16, 5, 8, 8)"], None),
        (lambda c: nn.Conv2d(c, 4, 1), [], f"{CHANGE} (16, 16, 1, 1) to (16, 4, 1, 1)"),
        # Reflection padding needs more than one pixel.
        (lambda c: nn.Conv2d(c, c, 3, padding=1, padding_mode="reflect"), [], "cannot run on features of shape (16"),
    ],
)
def test_a_seed_that_does_not_fit_a_slot_is_found_out(
    register: Register, build: Callable[[int], nn.Module], block1: list[str], block3: str | None
) -> None:
    register("own", build)
    reasons = probe_seeds(small_cnn(["block1", "block3.pool"]), ["own"], loss_of)
    assert reasons["block1", "own"] == block1
    assert block3 is None or reasons["block3.pool", "own"][0].startswith(block3)


def test_slots_that_the_forward_pass_misses_and_other_layouts_are_named() -> None:
    reasons = probe_seeds(Detour(), ["conv_light"], loss_of)
    assert {slot: reason for (slot, _), reason in reasons.items()} == {
        "block1": [],
        "unreached": ["the host's forward pass does not reach the slot"],
        "words": ["does not grow on sequence features"],
        "muted": ["its first gradient is zero: it could never learn"],
        "shut": ["its first gradient is zero: it could never learn"],
    }


def test_the_probe_leaves_the_global_generator_alone_and_a_host_may_answer_with_zero_at_first() -> None:
    torch.manual_seed(5)
    before, found = torch.get_rng_state(), []
    for _ in range(2):
        host = small_cnn(SLOTS)
        nn.init.zeros_(host.head.weight)  # it learns from the first batch on, and passes gradients back from then
        found.append(probe_seeds(host, ["conv_light", "norm"], loss_of))
    assert found[0] == found[1]
    assert not any(found[0].values())
    assert torch.equal(torch.get_rng_state(), before)
