"""What a slot does to the host's feature at every stage of its seed's life."""

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.blueprints import names
from esper_lightning.growth.alpha import Ramp
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import SLOTS, grow, loss_of, seeded, slot_named, small_cnn

SLOW = Ramp(start=0.0, target=1.0, ticks=4, curve="linear")


def feature() -> Tensor:  # [B, C, H, W]
    return torch.randn(2, 4, 8, 8, generator=seeded(3)).requires_grad_()


def host_gradients(network: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in network.named_parameters() if ".seed." not in name}


def tripling_slot(stage: Stage, isolate: bool | None, ramp: Ramp = SLOW) -> SeedSlot:
    """A slot whose seed multiplies by three."""
    slot = SeedSlot("block1", "image", 4, isolate)
    grow(slot, stage, "conv_small", ramp)
    convolution = slot.seed.body[-1]
    with torch.no_grad():
        convolution.weight.copy_(2.0 * torch.eye(4)[:, :, None, None])  # x + 2x
        convolution.bias.zero_()
    return slot


@pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING], ids=lambda stage: stage.name)
@pytest.mark.parametrize("blueprint", names("image"))
def test_a_training_seed_learns_without_touching_the_host(blueprint: str, stage: Stage) -> None:
    empty, growing = small_cnn(SLOTS), small_cnn(SLOTS)
    for name in SLOTS:
        grow(slot_named(growing, name), stage, blueprint)

    losses = [loss_of(network) for network in (empty, growing)]
    for loss in losses:
        loss.backward()

    assert torch.equal(*losses)
    expected, measured = host_gradients(empty), host_gradients(growing)
    assert list(measured) == list(expected)
    assert all(torch.equal(measured[name], expected[name]) for name in expected)
    for name in SLOTS:
        assert all(p.grad.any() for p in slot_named(growing, name).seed.parameters()), name


def test_a_host_trains_the_same_with_and_without_seeds_in_training() -> None:
    empty, growing = small_cnn(SLOTS), small_cnn(SLOTS)
    for name in SLOTS:
        grow(slot_named(growing, name), Stage.TRAINING)
    before = [p.clone() for p in slot_named(growing, "block2").seed.parameters()]
    for network in (empty, growing):
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(network, seed=step).backward()
            optimizer.step()
    grown = growing.state_dict()
    assert all(torch.equal(grown[name], value) for name, value in empty.state_dict().items())  # BatchNorm's too
    after = slot_named(growing, "block2").seed.parameters()
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_seed_that_has_blown_up_leaves_the_host_alone(value: float) -> None:
    empty, growing = small_cnn(), small_cnn()
    slot = slot_named(growing, "block1.pool")
    grow(slot, Stage.TRAINING)
    nn.init.constant_(slot.seed.body[-1].bias, value)
    for network in (empty, growing):
        loss_of(network).backward()
    expected, measured = host_gradients(empty), host_gradients(growing)
    assert all(torch.equal(measured[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("isolate", "slope"), [(True, 0.75), (None, 0.75), (False, 0.75 + 0.25 * 3.0)])
def test_isolation_keeps_the_host_from_learning_through_a_blending_seed(isolate: bool | None, slope: float) -> None:
    slot, x = tripling_slot(Stage.BLENDING, isolate), feature()
    y = slot(x)
    y.sum().backward()
    torch.testing.assert_close(y, 0.75 * x + 0.25 * 3.0 * x)  # alpha is 1/4 in the first tick of four
    torch.testing.assert_close(x.grad, torch.full_like(x, slope))
    assert all(p.grad.any() for p in slot.seed.parameters())


@pytest.mark.parametrize(("target", "slope"), [(1.0, 3.0), (0.5, 0.5 + 0.5 * 3.0)])
def test_a_fossil_is_never_isolated(target: float, slope: float) -> None:
    slot, x = tripling_slot(Stage.FOSSILIZED, True, SLOW._replace(target=target)), feature()
    y = slot(x)
    y.sum().backward()
    torch.testing.assert_close(y, slope * x)
    torch.testing.assert_close(x.grad, torch.full_like(x, slope))


@pytest.mark.parametrize(("layout", "isolated"), [("image", True), ("sequence", False), ("vector", False)])
def test_images_isolate_their_seeds_unless_told_otherwise(layout: Layout, isolated: bool) -> None:
    assert SeedSlot("a", layout, 4).isolate is isolated
    assert SeedSlot("a", layout, 4, isolate=not isolated).isolate is not isolated


def test_fossilizing_does_not_change_what_a_full_seed_says() -> None:
    slot, x = SeedSlot("block1", "image", 4), feature()
    grow(slot, Stage.PROBATIONARY)
    before = slot(x)
    slot.move_to(Stage.FOSSILIZED)
    assert torch.equal(slot(x), before)
    assert not torch.equal(before, x)


@pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING], ids=lambda stage: stage.name)
def test_in_evaluation_a_training_seed_does_not_even_run(stage: Stage) -> None:
    slot, x, runs = SeedSlot("block1", "image", 4), feature(), []
    grow(slot, stage)
    slot.seed.register_forward_hook(lambda *_: runs.append(1))
    assert slot.eval()(x) is x
    assert runs == []
    slot.train()(x)
    assert runs == [1]


@pytest.mark.parametrize("stage", [Stage.DORMANT, Stage.CULLED, Stage.EMBARGOED], ids=lambda stage: stage.name)
def test_a_slot_without_a_seed_is_the_identity(stage: Stage) -> None:
    slot, x = SeedSlot("block1", "image", 4), feature()
    slot.stage = stage
    assert slot(x) is x
    assert slot.eval()(x) is x


def test_alpha_moves_along_the_ramp_while_blending_and_then_rests() -> None:
    slot = SeedSlot("block1", "image", 4)
    grow(slot, Stage.BLENDING, ramp=SLOW._replace(target=0.5))
    seen = []
    for _ in range(4):
        seen.append((slot.alpha.item(), slot.alpha_velocity, slot.ticks_in_stage))
        slot.tick()
    assert seen == [(0.125, 0.125, 0), (0.25, 0.125, 1), (0.375, 0.125, 2), (0.5, 0.125, 3)]
    slot.move_to(Stage.PROBATIONARY)
    slot.tick()
    assert (slot.alpha.item(), slot.alpha_velocity, slot.ticks_in_stage) == (0.5, 0.0, 1)


def test_a_seed_ages_and_an_empty_slot_does_not() -> None:
    slot = SeedSlot("block1", "image", 4)
    slot.tick()
    assert (slot.age, slot.ticks_in_stage) == (0, 1)
    grow(slot, Stage.TRAINING)
    slot.tick()
    slot.tick()
    assert (slot.age, slot.ticks_in_stage) == (2, 2)


def test_emptying_a_slot_forgets_everything() -> None:
    slot, x = SeedSlot("block1", "image", 4), feature()
    grow(slot, Stage.FOSSILIZED, ramp=SLOW)
    slot.tick()
    slot.empty()
    assert slot(x) is x
    assert list(slot.parameters()) == []
    fresh = SeedSlot("block1", "image", 4)
    forgotten = ("stage", "blueprint", "ramp", "age", "ticks_in_stage", "alpha_now")
    assert [getattr(slot, name) for name in forgotten] == [getattr(fresh, name) for name in forgotten]
    assert slot.alpha.item() == 0.0


def test_a_host_may_work_in_place_behind_a_slot_with_a_training_seed() -> None:
    slot = SeedSlot("block1", "image", 4)
    host = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), slot, nn.ReLU(inplace=True))  # as torchvision's ResNets do
    grow(slot, Stage.TRAINING)
    host(feature()).sum().backward()
    assert all(p.grad.any() for p in slot.seed.parameters())
