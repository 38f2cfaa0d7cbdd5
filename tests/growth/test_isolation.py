"""Seeds that learn behind a host: the host is as without them, and a seed that learned does not harm when it is on."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.blueprints import build_on
from esper_lightning.growth import GrowingNetwork, LifecycleConfig, SeedSlot, attach_slots, slots_of
from esper_lightning.growth.blend import PROXIMAL_STEP, BlendStyle, Isolation, proximal_gradient
from esper_lightning.growth.slot import Layout
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.hosts.dropout import Dropout
from tests.growth.grown import (
    CPU,
    LAYOUTS,
    STYLES,
    add_noise,
    batch_of,
    generator_of,
    grow,
    host_of,
    loss_on,
    slot_named,
    small_batch,
    small_cnn,
)

ISOLATIONS: list[Isolation] = list(get_args(Isolation))

BLUEPRINTS: dict[Layout, str] = {"image": "conv_light", "sequence": "mlp_small", "vector": "mlp_small"}

every_isolation = pytest.mark.parametrize("isolation", ISOLATIONS)


class DropoutNet(nn.Module):
    """Convolutions with BatchNorm, an in-place ReLU, an in-place shortcut and Dropout; one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.conv = nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 1)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Sequential(nn.Dropout(0.3), Dropout(0.2))
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        y = self.norm(self.conv(self.twice(x)))
        y += x
        return self.head(self.dropout(self.relu(self.twice(y))).mean((2, 3)))


def dropout_net() -> nn.Module:
    network = build_on(CPU, DropoutNet, generator_of(0))
    for layer in network.dropout[1:]:
        layer.initialise(generator_of(1))
    attach_slots(network, ["norm"], small_batch(2)[0])
    return network


def train(growing: GrowingNetwork, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Take a step on each batch and return the losses."""
    torch.manual_seed(5)
    growing.module.train()
    losses = []
    for batch in batches:
        growing.optimizer.zero_grad()
        losses.append(growing.backward(lambda network, batch=batch: loss_on(network, batch)).detach())
        growing.optimizer.step()
    return losses


def growing_of(network: nn.Module, isolation: Isolation, lr: float = 0.01) -> GrowingNetwork:
    optimizer = torch.optim.Adam(network.parameters(), lr)
    return GrowingNetwork(network, optimizer, horizon=9, lifecycle=LifecycleConfig(isolation=isolation))


def without_slots(state: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: state[name] for name in reference}


@pytest.mark.thinned(5)
@every_isolation
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", [*LAYOUTS, "dropout"])
def test_a_host_trains_bit_for_bit_as_without_seeds_while_they_learn(
    layout: str, style: BlendStyle, isolation: Isolation
) -> None:
    make: Callable[[], nn.Module] = dropout_net if layout == "dropout" else lambda: host_of(layout)
    feature: Layout = "image" if layout == "dropout" else layout
    empty, growing = growing_of(make(), isolation), growing_of(make(), isolation)
    for i, name in enumerate(growing.slots):
        growing.germinate(name, BLUEPRINTS[feature], style=style)
        add_noise(growing.slots[name].seed, i)
        growing.slots[name].move_to(Stage.TRAINING)
    seeds = deepcopy([slot.seed.state_dict() for slot in growing.slots.values()])
    batches = [batch_of(feature, seed=seed) for seed in range(4)]

    losses, grown_losses = train(empty, batches), train(growing, batches)

    assert [loss.item() for loss in grown_losses] == [loss.item() for loss in losses]
    expected = empty.module.state_dict()  # BatchNorm's statistics too
    found = without_slots(growing.module.state_dict(), expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for slot, before in zip(growing.slots.values(), seeds, strict=True):
        after = slot.seed.seed.state_dict() if style == "gate" else slot.seed.state_dict()
        assert not any(
            torch.equal(value, before[f"seed.{name}" if style == "gate" else name]) for name, value in after.items()
        )


def test_the_proximal_gradient_is_the_loss_gradient_and_a_pull_of_bounded_reach() -> None:
    h, s, grad = (torch.randn(4, 3, 5, 5, generator=generator_of(seed)) for seed in range(3))
    strength = grad.square().sum().sqrt() / h.square().sum().sqrt()

    torch.testing.assert_close(proximal_gradient(grad, h, s), PROXIMAL_STEP * grad + (s - h) * strength)
    minimum = h - PROXIMAL_STEP * grad * h.square().sum().sqrt() / grad.square().sum().sqrt()
    torch.testing.assert_close(proximal_gradient(grad, h, minimum), torch.zeros_like(h), rtol=0.0, atol=1e-5)
    assert torch.equal(proximal_gradient(grad, h, h), PROXIMAL_STEP * grad)
    each = proximal_gradient(grad, h, s, dims=(1, 2, 3))
    torch.testing.assert_close(each[1:2], proximal_gradient(grad[1:2], h[1:2], s[1:2]))
    assert torch.equal(proximal_gradient(grad, torch.zeros_like(h), s), PROXIMAL_STEP * grad)


def distance_from_host(network: nn.Module, slot: SeedSlot, images: Tensor) -> float:
    """Return the distance of the seed's output from the host's feature, relative to the feature's norm."""
    features: list[Tensor] = []
    handle = slot.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    network(images)
    handle.remove()
    return ((slot.seed(features[0]) - features[0]).norm() / features[0].norm()).item()


@every_isolation
def test_only_a_seed_without_feedback_runs_away_from_the_host(isolation: Isolation) -> None:
    growing = growing_of(small_cnn(["block2"]), isolation)
    growing.germinate("block2", "conv_light")
    images, digits = small_batch(64)
    train(growing, [(images, digits)] * 60)

    distance = distance_from_host(growing.module, growing.slots["block2"], images)

    print(isolation, distance)
    assert (distance > 1.5) == (isolation == "straight_through")
    assert distance > 0.01


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trial_gives_a_seed_the_gradient_of_the_loss_with_the_seed_fully_on(
    layout: Layout, style: BlendStyle
) -> None:
    network = host_of(layout)
    names = list(slots_of(network))
    for i, name in enumerate(names):
        grow(slot_named(network, name), Stage.TRAINING, BLUEPRINTS[layout], seed=i, style=style)

    growing_of(network, "trial").backward(lambda host: loss_on(host, batch_of(layout)))

    for i, name in enumerate(names):  # each seed alone
        switched_on = deepcopy(network)
        for other in set(names) - {name}:
            slot_named(switched_on, other).empty()
        slot = slot_named(switched_on, name)
        for stage in (Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED):
            slot.move_to(stage)
        if isinstance(switched_on, CNN):
            switched_on.norms[i + 1 :].eval()  # those behind the slot use their running statistics
        expected = torch.autograd.grad(loss_on(switched_on, batch_of(layout)), list(slot.seed.parameters()))
        found = [p.grad for p in slot_named(network, name).seed.parameters()]
        torch.testing.assert_close(found, list(expected))


def test_a_trial_takes_over_features_that_were_changed_in_place_as_they_were() -> None:
    network = dropout_net()
    network.dropout = nn.Identity()
    slot = next(iter(slots_of(network).values()))
    grow(slot, Stage.TRAINING)
    switched_on = deepcopy(network)
    copied = next(iter(slots_of(switched_on).values()))
    for stage in (Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED):
        copied.move_to(stage)
    expected = torch.autograd.grad(loss_on(switched_on, small_batch()), list(copied.seed.parameters()))

    growing_of(network, "trial").backward(lambda host: loss_on(host, small_batch()))

    torch.testing.assert_close([p.grad for p in slot.seed.parameters()], list(expected))


def test_only_what_lies_behind_the_slot_is_computed_twice() -> None:
    network = small_cnn(["block1", "block2"])
    grow(slot_named(network, "block1"), Stage.BLENDING, "conv_light")
    grow(slot_named(network, "block2"), Stage.TRAINING)
    calls: Counter[str] = Counter()
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            original = layer.forward
            layer.forward = lambda x, name=name, original=original: (calls.update([name]), original(x))[1]

    growing_of(network, "trial").backward(lambda host: loss_on(host, small_batch()))

    calls_before = {name: count for name, count in calls.items() if not name.startswith("slots.block2")}
    assert calls_before == {"convs.0": 1, "slots.block1.seed.body.0": 1, "convs.1": 1, "convs.2": 2, "head": 2}


def test_micro_batches_of_a_trial_add_up() -> None:
    network = host_of("vector")
    for name in slots_of(network):
        grow(slot_named(network, name), Stage.TRAINING, "mlp_small")
    growing, (inputs, classes) = growing_of(network, "trial"), batch_of("vector")

    growing.backward(lambda host: loss_on(host, (inputs, classes)))
    whole = [p.grad.clone() for p in network.parameters()]
    growing.optimizer.zero_grad()
    for part in (slice(0, 8), slice(8, 16)):
        growing.backward(lambda host, part=part: F.cross_entropy(host(inputs[part]), classes[part]) / 2)

    torch.testing.assert_close([p.grad for p in network.parameters()], whole)


def test_seeds_learn_by_trial_behind_a_frozen_host() -> None:
    network = small_cnn(["block1"])
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    grow(slot_named(network, "block1"), Stage.TRAINING)
    seed = slot_named(network, "block1").seed
    growing = growing_of(network, "trial")

    growing.backward(lambda host: loss_on(host, small_batch()))

    assert any(parameter.grad.any() for parameter in seed.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("setting", ["isolation", "birth"])
def test_an_unknown_way_to_learn_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=f"lifecycle.{setting} 'proximall' is not known"):
        LifecycleConfig(**{setting: "proximall"})


def test_a_trial_that_breaks_off_leaves_the_network_as_it_was() -> None:
    network = small_cnn(["block1"])
    grow(slot_named(network, "block1"), Stage.TRAINING)
    state = deepcopy(network.state_dict())
    growing = growing_of(network, "trial")
    calls: list[int] = []

    def loss_of(host: nn.Module) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            host(small_batch()[0])
            raise RuntimeError("out of memory")
        return loss_on(host.eval(), small_batch())

    with pytest.raises(RuntimeError, match="out of memory"):
        growing.backward(loss_of)

    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert slot_named(network, "block1").override is None
    assert not any("forward" in vars(module) for module in network.modules())
