"""Image blueprints: groups of channels, and training of every layer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from esper_lightning.blueprints import blueprint_names, build_seed
from esper_lightning.blueprints.conv import group_norm_groups
from esper_lightning.growth.alpha import DEFAULT_RAMP
from esper_lightning.growth.lifecycle import germinate
from esper_lightning.growth.stages import Stage
from tests.growth.grown import LIFE, SLOTS, generator_of, loss_of, slot_named, small_cnn

NOTICEABLE = 1e-6
"""Gradient norm above the level of rounding, for weights and features near 1."""

every_blueprint = pytest.mark.parametrize("blueprint", blueprint_names("image"))


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


def new_seed_in(slot_name: str, blueprint: str, stage: Stage) -> tuple[nn.Module, nn.Module]:
    """Return a host and its new, untrained seed in `stage`."""
    network = small_cnn([slot_name])
    slot = slot_named(network, slot_name)
    germinate(slot, blueprint, DEFAULT_RAMP, generator=generator_of(2))
    for step in LIFE[1 : LIFE.index(stage) + 1]:
        slot.move_to(step)
    return network, slot.seed


@pytest.mark.thinned(5)
@every_blueprint
@pytest.mark.parametrize("slot", SLOTS)
def test_every_part_of_a_newborn_seed_learns_within_two_steps(blueprint: str, slot: str) -> None:
    network, seed = new_seed_in(slot, blueprint, Stage.TRAINING)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    largest = dict.fromkeys((name for name, _ in seed.named_parameters()), 0.0)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(network).backward()
        for name, parameter in seed.named_parameters():
            largest[name] = max(largest[name], parameter.grad.norm().item())
        optimizer.step()
    assert min(largest.values()) > NOTICEABLE, largest


@pytest.mark.thinned(5)
@every_blueprint
@pytest.mark.parametrize("slot", SLOTS)
def test_a_seed_alone_lowers_the_loss_within_fifty_steps(blueprint: str, slot: str) -> None:
    network, seed = new_seed_in(slot, blueprint, Stage.PROBATIONARY)
    optimizer = torch.optim.Adam(seed.parameters(), lr=0.02)  # the host does not learn
    first = loss_of(network).item()
    for _ in range(50):
        loss = loss_of(network)
        if loss.item() < 0.99 * first:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"loss {first:.4f} came down to {loss.item():.4f} only")


@pytest.mark.parametrize("size", [(5, 7), (1, 1)])
def test_a_norm_learns_from_a_detached_feature_in_either_memory_format(size: tuple[int, int]) -> None:
    x = torch.randn(3, 8, *size, generator=generator_of())
    gradients = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        seed = build_seed("norm", "image", 8, device=torch.device("cpu"), generator=generator_of(), birth="random")
        seed(x.contiguous(memory_format=memory_format)).square().sum().backward()  # torch 2.11 would crash
        gradients.append(torch.cat([p.grad.flatten() for p in seed.parameters()]))
    torch.testing.assert_close(*gradients)
