"""Effect of a slot on the host's feature at every stage of its seed."""

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import add_noise, bits, generator_of, grow, loss_of, slot_named, small_cnn

SLOW = Ramp(4)


def feature() -> Tensor:  # [B, C, H, W]
    return torch.randn(2, 4, 8, 8, generator=generator_of(3)).requires_grad_()


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
