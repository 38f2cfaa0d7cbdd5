"""Effect of a slot on the host's feature at every stage of its seed."""

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.blueprints import blueprint_names
from esper_lightning.growth.alpha import Ramp
from esper_lightning.growth.blend import BlendStyle
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import (
    LAYOUTS,
    SLOTS,
    STYLES,
    add_noise,
    batch_of,
    generator_of,
    grow,
    host_of,
    loss_of,
    loss_on,
    slot_named,
    small_cnn,
)

SLOW = Ramp(start=0.0, target=1.0, ticks=4, curve="linear")


def feature() -> Tensor:  # [B, C, H, W]
    return torch.randn(2, 4, 8, 8, generator=generator_of(3)).requires_grad_()


def host_gradients(network: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in network.named_parameters() if ".seed." not in name}


def bits(x: Tensor) -> Tensor:
    """Return the bit patterns as integers, which distinguish 0 from -0 and make NaN equal to itself."""
    return x.detach().view(torch.int32)


def tripling_slot(stage: Stage, isolate: bool | None, ramp: Ramp = SLOW) -> SeedSlot:
    """Return a slot whose seed multiplies by three."""
    slot = SeedSlot("block1", "image", 4, detach_input=isolate)
    grow(slot, stage, "conv_small", ramp)
    convolution = slot.seed.body[-1]
    with torch.no_grad():
        convolution.weight.copy_(2.0 * torch.eye(4)[:, :, None, None])  # x + 2x
        convolution.bias.zero_()
    return slot


every_style = pytest.mark.parametrize("style", STYLES)

every_layout = pytest.mark.parametrize("layout", LAYOUTS)

while_learning = pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING], ids=lambda stage: stage.name)


@pytest.mark.thinned(5)
@while_learning
@every_style
@pytest.mark.parametrize(
    ("layout", "blueprint"), [(layout, name) for layout in LAYOUTS for name in blueprint_names(layout)]
)
def test_a_training_seed_learns_without_touching_the_host(
    layout: Layout, blueprint: str, style: BlendStyle, stage: Stage
) -> None:
    empty, growing = host_of(layout), host_of(layout)
    for slot in slots_of(growing).values():
        grow(slot, stage, blueprint, style=style)

    losses = [loss_on(network, batch_of(layout)) for network in (empty, growing)]
    for loss in losses:
        loss.backward()

    assert torch.equal(*losses)
    expected, measured = host_gradients(empty), host_gradients(growing)
    assert list(measured) == list(expected)
    assert all(torch.equal(measured[name], expected[name]) for name in expected)
    for slot in slots_of(growing).values():
        assert all(p.grad.any() for p in slot.seed.parameters()), slot.name


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


@while_learning
@every_style
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_seed_that_has_blown_up_leaves_the_host_alone(value: float, style: BlendStyle, stage: Stage) -> None:
    empty, growing = small_cnn(), small_cnn()
    slot = slot_named(growing, "block1.pool")
    grow(slot, stage, style=style)
    body = slot.seed.seed.body if style == "gate" else slot.seed.body
    nn.init.constant_(body[-1].bias, value)
    x = feature()
    assert torch.equal(bits(slot(x)), bits(x))
    losses = [loss_of(network) for network in (empty, growing)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    expected, measured = host_gradients(empty), host_gradients(growing)
    assert all(torch.equal(measured[name], expected[name]) for name in expected)


def gradient_by_hand(
    style: BlendStyle, slot: SeedSlot, h: Tensor, output_gradient: Tensor, alpha: float, isolated: bool
) -> Tensor:  # [B, C]
    """Return the gradient of the feature for a blended seed s(h) = h·Wᵀ and the output gradient `arriving`."""
    body = (slot.seed.seed if style == "gate" else slot.seed).body  # W = I + BA
    w = (torch.eye(h.shape[1]).double() + body[1].weight @ body[0].weight).detach()
    s = h @ w.T
    if style == "add":
        return (1.0 - alpha) * output_gradient + (0.0 if isolated else alpha * output_gradient @ w)
    if style == "multiply":
        t = torch.tanh(s - h)
        through_host = output_gradient * (1.0 + alpha * t)
        through_seed = (output_gradient * h * alpha * (1.0 - t.square())) @ (w - torch.eye(h.shape[1]).double())
        return through_host + (0.0 if isolated else through_seed)
    w1, b1, w2, b2 = (parameter.detach() for parameter in slot.seed.gate.parameters())
    before = h @ w1.T + b1
    g = torch.sigmoid(before.clamp(min=0.0) @ w2.T + b2)  # [B, 1]
    slope = g * (1.0 - g) * (((before > 0) * w2) @ w1)  # [B, C]
    through_gate = alpha * (output_gradient * (s - h)).sum(1, keepdim=True) * slope
    return (1.0 - alpha * g) * output_gradient + (0.0 if isolated else alpha * g * output_gradient @ w + through_gate)


@every_style
@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("stage", [Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED], ids=lambda stage: stage.name)
def test_the_gradient_that_reaches_the_host_is_the_one_computed_by_hand(
    stage: Stage, isolate: bool, style: BlendStyle
) -> None:
    slot = SeedSlot("layer1", "vector", 6, detach_input=isolate).double()
    grow(slot, stage, "lora", SLOW._replace(target=0.25), style=style)
    slot.alpha.fill_(0.25)
    add_noise(slot.seed, seed=1)
    h = torch.randn(4, 6, generator=generator_of(3), dtype=torch.float64, requires_grad=True)
    arriving = torch.randn(4, 6, generator=generator_of(4), dtype=torch.float64)
    slot(h).backward(arriving)
    isolated = isolate and stage is not Stage.FOSSILIZED
    expected = gradient_by_hand(style, slot, h.detach(), arriving, 0.25, isolated)
    torch.testing.assert_close(h.grad, expected, rtol=1e-12, atol=1e-12)
    assert all(p.grad.any() for p in slot.seed.parameters())


@every_style
def test_isolation_costs_the_seed_nothing_of_its_own_gradient(style: BlendStyle) -> None:
    gradients = []
    for isolate in (True, False):
        slot, x = SeedSlot("layer1", "vector", 6, detach_input=isolate), torch.randn(4, 6, generator=generator_of(3))
        grow(slot, Stage.PROBATIONARY, "mlp_small", SLOW, style=style)
        slot(x).square().sum().backward()
        gradients.append([p.grad for p in slot.seed.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


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
    assert SeedSlot("a", layout, 4).detach_input is isolated
    assert SeedSlot("a", layout, 4, detach_input=not isolated).detach_input is not isolated


@every_style
def test_fossilizing_does_not_change_what_a_full_seed_says(style: BlendStyle) -> None:
    slot, x = SeedSlot("block1", "image", 4), feature()
    grow(slot, Stage.PROBATIONARY, style=style)
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
        slot.end_epoch()
    assert seen == [(0.125, 0.125, 0), (0.25, 0.125, 1), (0.375, 0.125, 2), (0.5, 0.125, 3)]
    slot.move_to(Stage.PROBATIONARY)
    slot.end_epoch()
    assert (slot.alpha.item(), slot.alpha_velocity, slot.ticks_in_stage) == (0.5, 0.0, 1)


def test_a_ramping_seed_reports_its_alpha_of_the_last_epoch() -> None:
    slot = SeedSlot("block1", "image", 4)
    grow(slot, Stage.BLENDING, ramp=SLOW)
    shares = []
    for _ in range(6):
        shares.append(slot.alpha_progress)
        slot.end_epoch()
    assert shares == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_alpha_that_comes_down_is_as_near_as_its_target_is_to_it() -> None:
    slot = SeedSlot("block1", "image", 4)
    grow(slot, Stage.PROBATIONARY)
    slot.start_ramp(Ramp(start=1.0, target=0.5, ticks=2, curve="linear"))
    shares = []
    for _ in range(4):
        shares.append(slot.alpha_progress)
        slot.end_epoch()
    assert shares == pytest.approx([0.5, 0.5 / 0.75, 1.0, 1.0])


def test_a_new_aim_is_followed_from_the_coming_epoch_on() -> None:
    slot = SeedSlot("block1", "image", 4)
    grow(slot, Stage.BLENDING, ramp=SLOW)
    slot.end_epoch()
    slot.start_ramp(Ramp(start=slot.alpha_now, target=0.1, ticks=4, curve="linear"))
    seen = []
    for _ in range(5):
        seen.append((slot.alpha.item(), slot.ramp_ticks))
        slot.end_epoch()
    alphas, ticks = zip(*seen, strict=True)
    assert alphas == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.1])
    assert ticks == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("stage", "ramping"),
    [
        *[(stage, False) for stage in (Stage.GERMINATED, Stage.TRAINING, Stage.FOSSILIZED)],
        *[(stage, True) for stage in (Stage.BLENDING, Stage.PROBATIONARY)],
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_alpha_moves_and_fades_only_while_a_seed_is_on_trial_in_the_host(stage: Stage, ramping: bool) -> None:
    slot = SeedSlot("block1", "image", 4)
    grow(slot, stage, ramp=SLOW)
    assert (slot.ramping, slot.fading) == (ramping, False)
    slot.ramp = slot.ramp._replace(target=0.0)
    assert slot.fading is ramping
    ticks = slot.ramp_ticks
    slot.end_epoch()
    assert slot.ramp_ticks == ticks + ramping


def test_alpha_is_no_part_of_the_state_dict_so_an_empty_slot_adds_nothing_to_its_hosts() -> None:
    assert SeedSlot("block1", "image", 4).state_dict() == {}
    assert list(small_cnn(SLOTS).state_dict()) == list(small_cnn([]).state_dict())


def test_alpha_goes_where_its_host_goes() -> None:
    slot = SeedSlot("block1", "image", 4)
    assert slot.double().alpha.dtype == torch.float64
    assert slot.to("meta").alpha.device.type == "meta"


def test_a_seed_ages_and_an_empty_slot_does_not() -> None:
    slot = SeedSlot("block1", "image", 4)
    slot.end_epoch()
    assert (slot.age, slot.ticks_in_stage) == (0, 1)
    grow(slot, Stage.TRAINING)
    slot.end_epoch()
    slot.end_epoch()
    assert (slot.age, slot.ticks_in_stage) == (2, 2)


def test_emptying_a_slot_forgets_everything() -> None:
    slot, x = SeedSlot("block1", "image", 4), feature()
    grow(slot, Stage.BLENDING, ramp=SLOW, style="gate")
    slot.end_epoch()
    slot.empty()
    assert slot(x) is x
    assert list(slot.parameters()) == []
    fresh = SeedSlot("block1", "image", 4)
    forgotten = ("stage", "blueprint", "style", "ramp", "ramp_ticks", "age", "ticks_in_stage", "alpha_now")
    assert [getattr(slot, name) for name in forgotten] == [getattr(fresh, name) for name in forgotten]
    assert slot.alpha.item() == 0.0


def test_a_host_may_work_in_place_behind_a_slot_with_a_training_seed() -> None:
    slot = SeedSlot("block1", "image", 4)
    host = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), slot, nn.ReLU(inplace=True))  # like torchvision's ResNets
    grow(slot, Stage.TRAINING)
    host(feature()).sum().backward()
    assert all(p.grad.any() for p in slot.seed.parameters())
