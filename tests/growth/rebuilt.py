"""Grown networks, and copies rebuilt from their saved state."""

import io
import json
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.blueprints import blueprint_names
from esper_lightning.growth.alpha import Ramp
from esper_lightning.growth.lifecycle import cull, slots_of
from esper_lightning.growth.manifest import manifest, rebuild
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.growth.grown import (
    LIFE,
    SLOTS,
    STYLES,
    grow,
    loss_of,
    slot_named,
    small_batch,
    small_cnn,
)

RAMP = Ramp(start=0.0, target=0.7, ticks=5, curve="sigmoid12")


def grown_cnn() -> CNN:
    """Return a host whose six slots are in six different stages, one of them in the middle of its ramp."""
    network = small_cnn(SLOTS)
    stages = [*LIFE, Stage.TRAINING]
    for i, (name, stage, blueprint) in enumerate(zip(SLOTS, stages, blueprint_names("image"), strict=False)):
        grow(slot_named(network, name), stage, blueprint, RAMP, style=STYLES[i % 3])
    cull(slot_named(network, "block3.pool"))
    for slot in slots_of(network).values():
        slot.end_epoch()
        slot.end_epoch()
    network.train()
    loss_of(network)  # moves BatchNorm's statistics
    return network


def rebuild_from(network: nn.Module, into: nn.Module) -> nn.Module:
    """Return `into`, rebuilt from the manifest and state dict of `network`."""
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    rebuild(into, json.loads(json.dumps(manifest(network))))
    into.load_state_dict(torch.load(file, weights_only=True))
    return into


def outputs_in_both_modes(network: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Return the network's outputs in training and in evaluation mode."""
    return [network.train(mode)(inputs).detach() for mode in (True, False)]


def same(network: nn.Module, copy: nn.Module, inputs: Tensor) -> bool:
    pairs = zip(outputs_in_both_modes(network, inputs), outputs_in_both_modes(copy, inputs), strict=True)
    return manifest(network) == manifest(copy) and all(torch.equal(a, b) for a, b in pairs)


def grown_pair() -> CNN:
    network = small_cnn(["block1", "block2"])
    grow(slot_named(network, "block1"), Stage.BLENDING, "norm", RAMP)
    grow(slot_named(network, "block2"), Stage.TRAINING, "conv_small", RAMP)
    return network


def check_refused_and_unchanged(attempt: Callable[[nn.Module], None], message: str) -> None:
    """Assert that `attempt` on a grown network raises a ValueError of one line and changes nothing."""
    here = small_cnn(["block1", "block2"], seed=5).eval()
    grow(slot_named(here, "block1"), Stage.FOSSILIZED, "conv_heavy")
    story, weights, answer = manifest(here), deepcopy(here.state_dict()), here(small_batch()[0])
    with pytest.raises(ValueError, match=message) as refusal:
        attempt(here)
    assert type(refusal.value) is ValueError
    assert "\n" not in str(refusal.value)
    assert manifest(here) == story
    assert list(weights) == list(here.state_dict())
    assert all(torch.equal(weights[name], value) for name, value in here.state_dict().items())
    assert torch.equal(here(small_batch()[0]), answer)
