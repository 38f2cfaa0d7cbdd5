"""A slot at every stage of its seed: how it blends, what reaches the host, and how the seed learns behind it."""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.growth import GrowingNetwork, LifecycleConfig, attach_slots
from esper_lightning.growth.blend import PROXIMAL_STEP, Curve, Isolation, Ramp, blend, proximal_gradient
from esper_lightning.growth.blueprints import build_on
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import (
    CPU,
    LAYOUTS,
    SIMPLE,
    add_noise,
    batch_of,
    bits,
    generator_of,
    grow,
    host_of,
    loss_of,
    loss_on,
    same_host,
    slot_named,
    small_batch,
    small_cnn,
)

# Blending.


SHAPES: dict[Layout, tuple[int, ...]] = {"image": (3, 8, 4, 5), "sequence": (3, 7, 8), "vector": (3, 8)}

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def feature(layout: Layout, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPES[layout], generator=generator_of(3), dtype=torch.float64).to(dtype)


def grown_slot(layout: Layout, stage: Stage = Stage.PROBATIONARY) -> SeedSlot:
    slot = SeedSlot("place", layout, 8)
    grow(slot, stage, SIMPLE[layout], Ramp())
    return slot


@pytest.mark.parametrize("alpha", [0.0, 0.125, 0.5, 0.7, 1.0])
@every_layout
def test_blending_is_its_formula_in_double_precision(layout: Layout, alpha: float) -> None:
    slot, x = grown_slot(layout).double(), feature(layout, torch.float64)
    slot.alpha.fill_(alpha)
    s = slot.seed(x)
    torch.testing.assert_close(slot(x), (1.0 - alpha) * x + alpha * s, rtol=1e-12, atol=1e-12)
    assert alpha or torch.equal(slot(x), x), "exactly the host at alpha 0"
    slot.move_to(Stage.FOSSILIZED)
    torch.testing.assert_close(slot(x), s, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("host", "seed"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")])
def test_the_host_keeps_its_precision_and_its_numbers_whatever_the_seeds(host: str, seed: str) -> None:
    h, s = feature("vector", getattr(torch, host)), 3.0 * feature("vector", getattr(torch, seed))
    blended = blend(h, s, torch.zeros(()))
    assert blended.dtype == h.dtype
    assert torch.equal(blended, h)
    assert torch.equal(blend(h, s, torch.ones(())), s.to(h.dtype))


@every_layout
def test_under_autocast_a_training_seed_learns_and_leaves_the_host_alone(layout: Layout) -> None:
    slot, x = grown_slot(layout, Stage.TRAINING), feature(layout).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = slot(x)
    y.square().sum().backward()
    assert torch.equal(bits(y), bits(x))
    assert torch.equal(x.grad, 2 * x)
    assert all(p.grad.any() for p in slot.seed.parameters())


# Ramps of alpha.


@pytest.mark.parametrize("curve", get_args(Curve))
@pytest.mark.parametrize("ticks", [0, 1, 2, 7, 300])
def test_a_ramp_rises_at_every_tick_from_exactly_0_to_exactly_1(curve: Curve, ticks: int) -> None:
    values = [Ramp(ticks, curve).value(tick) for tick in range(max(1, ticks) + 1)]
    assert (values[0], values[-1], Ramp(ticks, curve).value(ticks + 5)) == (0.0, 1.0, 1.0)
    assert all(earlier < later for earlier, later in pairwise(values))
    assert [1.0 - value for value in reversed(values)] == pytest.approx(values, abs=1e-12), "symmetric"


# Stages.


SLOW = Ramp(4)


while_learning = pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING], ids=lambda stage: stage.name)


@while_learning
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_seed_that_has_blown_up_leaves_the_host_alone(value: float, stage: Stage) -> None:
    empty, growing = small_cnn(), small_cnn()
    slot = slot_named(growing, "block1.pool")
    grow(slot, stage)
    nn.init.constant_(slot.seed.body[-1].bias, value)
    x = torch.tensor([0.0, -0.0, 1e-45, 3e38, float("inf"), float("nan")])[:, None, None, None].expand(-1, 4, 8, 8)
    assert torch.equal(bits(slot(x)), bits(x))
    losses = [loss_of(network) for network in (empty, growing)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    expected, measured = (
        [p.grad for name, p in network.named_parameters() if ".seed." not in name] for network in (empty, growing)
    )
    assert all(map(torch.equal, measured, expected))


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("stage", [Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED], ids=lambda stage: stage.name)
def test_the_gradient_that_reaches_the_host_is_the_one_computed_by_hand(stage: Stage, isolate: bool) -> None:
    slot = SeedSlot("layer1", "vector", 6, detach_input=isolate).double()
    grow(slot, stage, "lora", SLOW)
    slot.alpha.fill_(0.25)  # a fossilized seed does not use it
    add_noise(slot.seed, seed=1)
    h = torch.randn(4, 6, generator=generator_of(3), dtype=torch.float64, requires_grad=True)
    arriving = torch.randn(4, 6, generator=generator_of(4), dtype=torch.float64)
    slot(h).backward(arriving)
    is_fossil = stage is Stage.FOSSILIZED
    body, alpha = slot.seed.body, 1.0 if is_fossil else 0.25
    w = (torch.eye(6).double() + body[1].weight @ body[0].weight).detach()  # the seed is x·Wᵀ, W = I + BA
    expected = (1.0 - alpha) * arriving + (0.0 if isolate and not is_fossil else alpha * arriving @ w)
    torch.testing.assert_close(h.grad, expected, rtol=1e-12, atol=1e-12)
    assert all(p.grad.any() for p in slot.seed.parameters())


@while_learning
def test_in_evaluation_a_training_seed_does_not_even_run(stage: Stage) -> None:
    slot, x, runs = SeedSlot("block1", "image", 8), feature("image"), []
    grow(slot, stage)
    slot.seed.register_forward_hook(lambda *_: runs.append(1))
    assert slot.eval()(x) is x
    assert runs == []
    slot.train()(x)
    assert runs == [1]


@pytest.mark.parametrize("stage", [Stage.DORMANT, Stage.CULLED, Stage.EMBARGOED], ids=lambda stage: stage.name)
def test_a_slot_without_a_seed_is_the_identity(stage: Stage) -> None:
    slot, x = SeedSlot("block1", "image", 8), feature("image")
    slot.stage = stage
    assert slot(x) is x
    assert slot.eval()(x) is x


def test_alpha_moves_along_the_ramp_from_blending_on_and_then_rests() -> None:
    slot = SeedSlot("block1", "image", 4)
    slot.end_epoch()
    assert (slot.age, slot.ticks_in_stage) == (0, 1)
    for stage in (Stage.GERMINATED, Stage.TRAINING):
        slot.empty()
        grow(slot, stage, ramp=SLOW)
        slot.end_epoch()
        assert (slot.alpha.item(), slot.alpha_before, slot.ramp_ticks) == (0.0, 0.0, 0)
    slot.move_to(Stage.BLENDING)
    seen = []
    for _ in range(5):
        seen.append((slot.alpha.item(), slot.alpha_before, slot.alpha_velocity, slot.ticks_in_stage))
        slot.end_epoch()
    assert seen == [*((0.25 * (i + 1), 0.25 * i, 0.25, i) for i in range(4)), (1.0, 1.0, 0.0, 4)]
    for stage in (Stage.PROBATIONARY, Stage.FOSSILIZED):
        slot.move_to(stage)
        slot.end_epoch()
        assert (slot.alpha.item(), slot.alpha_before, slot.ticks_in_stage) == (1.0, 1.0, 1)
    assert slot.age == 8


# A host in training, as without the seeds behind it.


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


@pytest.mark.parametrize("isolation", get_args(Isolation))
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
