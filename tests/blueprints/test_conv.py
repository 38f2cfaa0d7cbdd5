"""Image blueprints: their size, their birth as the identity, and that every part of them learns."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper_lightning.blueprints import build_seed, get, names
from esper_lightning.blueprints.conv import group_norm_groups
from esper_lightning.growth.alpha import FULL
from esper_lightning.growth.network import germinate
from esper_lightning.growth.stages import Stage
from tests.growth.grown import LIFE, SLOTS, loss_of, seeded, slot_named, small_cnn

CPU = torch.device("cpu")

NOTICEABLE = 1e-6
"""A gradient norm above this is more than rounding: weights and features here are near 1."""

every_blueprint = pytest.mark.parametrize("blueprint", names("image"))


def feature(channels: int, samples: int = 3) -> Tensor:
    return 2.0 * torch.randn(samples, channels, 5, 7, generator=seeded(channels)) + 0.5


@every_blueprint
def test_the_number_of_parameters_is_known_before_the_seed_is_built(blueprint: str) -> None:
    for width in range(1, 41):
        with torch.device("meta"):
            seed = get(blueprint).build(width)
        assert get(blueprint).parameters(width) == sum(p.numel() for p in seed.parameters()), width


@pytest.mark.parametrize(
    ("blueprint", "at_8", "at_64"),
    [
        ("norm", 17, 129),
        ("attention", 8 * 4 + 4 + 4 * 8 + 8, 64 * 16 + 16 + 16 * 64 + 64),
        ("conv_small", 72, 4160),
        ("depthwise", 80 + 72, 640 + 4160),
        ("bottleneck", 72 + 584 + 72, 1040 + 2320 + 1088),
        ("conv_light", 584, 36928),
        ("conv_heavy", 1168, 73856),
    ],
)
def test_sizes_are_those_of_the_manual(blueprint: str, at_8: int, at_64: int) -> None:
    assert (get(blueprint).parameters(8), get(blueprint).parameters(64)) == (at_8, at_64)


@every_blueprint
@pytest.mark.parametrize("width", [1, 3, 8, 33])
def test_a_seed_is_born_as_the_identity_exactly(blueprint: str, width: int) -> None:
    x = feature(width)
    seed = build_seed(blueprint, "image", width, CPU, seeded())
    assert torch.equal(seed(x), x)


@every_blueprint
def test_samples_do_not_see_each_other(blueprint: str) -> None:
    x, seed = feature(8), build_seed(blueprint, "image", 8, CPU, seeded())
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=seeded(1))
    alone = torch.cat([seed(sample[None]) for sample in x])
    torch.testing.assert_close(seed(x), alone)
    assert not torch.allclose(alone, x)


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(1, 1), (8, 1), (16, 1), (31, 1), (32, 2), (48, 2), (64, 4), (128, 8), (512, 32), (999, 1)],
)
def test_a_group_has_sixteen_channels_where_they_divide(channels: int, groups: int) -> None:
    assert group_norm_groups(channels) == groups


@given(channels=st.integers(1, 4096))
def test_groups_always_divide_the_channels(channels: int) -> None:
    groups = group_norm_groups(channels)
    assert channels % groups == 0
    assert groups == 1 or channels // groups >= 16


def born_in(slot_name: str, blueprint: str, stage: Stage) -> tuple[nn.Module, nn.Module]:
    """A host and its newborn seed, led to `stage` without having learned."""
    network = small_cnn([slot_name])
    slot = slot_named(network, slot_name)
    germinate(slot, blueprint, FULL, seeded(2))
    for step in LIFE[1 : LIFE.index(stage) + 1]:
        slot.move_to(step)
    return network, slot.seed


@every_blueprint
@pytest.mark.parametrize("slot", SLOTS)
def test_every_part_of_a_newborn_seed_learns_within_two_steps(blueprint: str, slot: str) -> None:
    network, seed = born_in(slot, blueprint, Stage.TRAINING)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    largest = dict.fromkeys((name for name, _ in seed.named_parameters()), 0.0)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(network).backward()
        for name, parameter in seed.named_parameters():
            largest[name] = max(largest[name], parameter.grad.norm().item())
        optimizer.step()
    assert min(largest.values()) > NOTICEABLE, largest


@every_blueprint
@pytest.mark.parametrize("slot", SLOTS)
def test_a_seed_alone_lowers_the_loss_within_fifty_steps(blueprint: str, slot: str) -> None:
    network, seed = born_in(slot, blueprint, Stage.PROBATIONARY)
    optimizer = torch.optim.Adam(seed.parameters(), lr=0.02)  # the host stands still
    first = loss_of(network).item()
    for _ in range(50):
        loss = loss_of(network)
        if loss.item() < 0.99 * first:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"loss {first:.4f} came down to {loss.item():.4f} only")
