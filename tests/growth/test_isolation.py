"""Seeds that learn behind a host: the host is as without them, and a seed that learned does not harm when it is on."""

from collections.abc import Callable
from copy import deepcopy
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.growth import GrowingNetwork, LifecycleConfig, attach_slots
from esper_lightning.growth.blend import PROXIMAL_STEP, Isolation, proximal_gradient
from esper_lightning.growth.blueprints import build_on
from esper_lightning.growth.slot import Layout
from esper_lightning.growth.stages import Stage
from tests.growth.grown import (
    CPU,
    LAYOUTS,
    SIMPLE,
    add_noise,
    batch_of,
    generator_of,
    host_of,
    loss_on,
    same_host,
    small_batch,
)

ISOLATIONS: list[Isolation] = list(get_args(Isolation))

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
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        y = self.norm(self.conv(self.twice(x)))
        y += x
        return self.head(self.dropout(self.relu(self.twice(y))).mean((2, 3)))


def dropout_net() -> nn.Module:
    network = build_on(CPU, DropoutNet, generator_of(0))
    attach_slots(network, ["norm"], small_batch(2)[0])
    return network


def train(growing: GrowingNetwork, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Take a step on each batch and return the losses."""
    torch.manual_seed(5)
    growing.module.train()
    losses = []
    for batch in batches:
        growing.optimizer.zero_grad()
        losses.append(loss_on(growing.module, batch))
        losses[-1].backward()
        growing.optimizer.step()
    return losses


def growing_of(network: nn.Module, isolation: Isolation, lr: float = 0.01) -> GrowingNetwork:
    optimizer = torch.optim.Adam(network.parameters(), lr)
    return GrowingNetwork(network, optimizer, horizon=9, lifecycle=LifecycleConfig(isolation=isolation))


@pytest.mark.thinned(5)
@every_isolation
@pytest.mark.parametrize("layout", [*LAYOUTS, "dropout"])
def test_a_host_trains_bit_for_bit_as_without_seeds_while_they_learn(layout: str, isolation: Isolation) -> None:
    make: Callable[[], nn.Module] = dropout_net if layout == "dropout" else lambda: host_of(layout)
    feature: Layout = "image" if layout == "dropout" else layout
    empty, growing = growing_of(make(), isolation), growing_of(make(), isolation)
    for i, name in enumerate(growing.slots):
        growing.germinate(name, SIMPLE[feature])
        add_noise(growing.slots[name].seed, i)
        growing.slots[name].move_to(Stage.TRAINING)
    seeds = deepcopy([slot.seed.state_dict() for slot in growing.slots.values()])
    batches = [batch_of(feature, seed=seed) for seed in range(4)]

    losses, grown_losses = train(empty, batches), train(growing, batches)

    assert [loss.item() for loss in grown_losses] == [loss.item() for loss in losses]
    assert same_host(growing.module, empty.module)
    for slot, before in zip(growing.slots.values(), seeds, strict=True):
        assert not any(torch.equal(value, before[name]) for name, value in slot.seed.state_dict().items())


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
