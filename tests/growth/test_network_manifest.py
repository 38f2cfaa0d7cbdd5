"""A grown network is rebuilt exactly from its manifest and its state dict."""

import io
import json

import pytest
import torch
from torch import nn

from esper_lightning.blueprints import names, registry
from esper_lightning.growth.alpha import FULL, Ramp
from esper_lightning.growth.gates import Evidence, LifecycleConfig
from esper_lightning.growth.network import advance, cull, germinate, manifest, rebuild, slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.growth.grown import LIFE, SLOTS, grow, loss_of, seeded, slot_named, small_batch, small_cnn

RAMP = Ramp(start=0.0, target=0.7, ticks=5, curve="sigmoid12")


def grown_cnn() -> CNN:
    """A host whose six slots are in six different stages; one of them is in the middle of its ramp."""
    network = small_cnn(SLOTS)
    stages = [*LIFE, Stage.TRAINING]
    for name, stage, blueprint in zip(SLOTS, stages, names("image"), strict=False):
        grow(slot_named(network, name), stage, blueprint, RAMP)
    cull(slot_named(network, "block3.pool"))
    for slot in slots_of(network).values():
        slot.tick()
        slot.tick()
    network.train()
    loss_of(network)  # moves BatchNorm's statistics
    return network


def carried_over(network: CNN, into: CNN) -> CNN:
    """`into`, rebuilt from what a file can hold of `network`."""
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    rebuild(into, json.loads(json.dumps(manifest(network))))
    into.load_state_dict(torch.load(file, weights_only=True))
    return into


def test_a_rebuilt_network_says_and_learns_exactly_the_same() -> None:
    network = grown_cnn()
    copy = carried_over(network, small_cnn(SLOTS, seed=99))
    images, _ = small_batch()
    assert manifest(copy) == manifest(network)
    for mode in (True, False):
        assert torch.equal(copy.train(mode)(images), network.train(mode)(images))
    for each in (network.train(), copy.train()):
        loss_of(each).backward()
    pairs = zip(network.named_parameters(), copy.named_parameters(), strict=True)
    assert all(a == b and torch.equal(p.grad, q.grad) for (a, p), (b, q) in pairs)


@pytest.mark.parametrize("blueprint", names("image"))
def test_every_blueprint_is_rebuilt(blueprint: str) -> None:
    network = small_cnn()
    grow(slot_named(network, "block1.pool"), Stage.FOSSILIZED, blueprint)
    copy = carried_over(network, small_cnn(seed=99))
    images, _ = small_batch()
    assert torch.equal(copy.eval()(images), network.eval()(images))
    assert not torch.equal(small_cnn().eval()(images), network.eval()(images))  # the seed does matter


def test_rebuilding_replaces_whatever_had_grown() -> None:
    network, other = grown_cnn(), small_cnn(SLOTS, seed=5)
    for name in SLOTS:
        grow(slot_named(other, name), Stage.FOSSILIZED, "conv_heavy")
    copy = carried_over(network, other)
    images, _ = small_batch()
    assert manifest(copy) == manifest(network)
    assert torch.equal(copy.eval()(images), network.eval()(images))


def test_a_rebuilt_seed_goes_on_along_its_ramp() -> None:
    network = grown_cnn()
    copy = carried_over(network, small_cnn(SLOTS, seed=99))
    lives = []
    for each in (network, copy):
        slot, seen = slot_named(each, "block2"), []
        assert slot.stage is Stage.BLENDING
        for _ in range(4):
            slot.tick()
            share = slot.ramp.value(slot.ticks_in_stage) / slot.ramp.target
            events = advance(slot, Evidence(slot.ticks_in_stage, share, 1.0, 1.0), LifecycleConfig(), horizon=50)
            seen.append((slot.stage, slot.alpha.item(), slot.alpha_velocity, slot.age, events))
        lives.append(seen)
    assert lives[0] == lives[1]
    assert lives[0][-1][0] is Stage.PROBATIONARY


def test_the_manifest_alone_restores_alpha() -> None:
    network, copy = grown_cnn(), small_cnn(SLOTS)
    rebuild(copy, manifest(network))
    alphas = [[slot.alpha.item() for slot in slots_of(each).values()] for each in (network, copy)]
    assert alphas[0] == alphas[1]
    assert len(set(alphas[0])) == 3  # nothing, part of the way, and the target


def test_a_manifest_is_plain_and_tells_the_story() -> None:
    network = small_cnn(["block1", "block2"])
    grow(slot_named(network, "block2"), Stage.BLENDING, "depthwise", RAMP)
    slot_named(network, "block2").tick()
    empty, full = manifest(network)
    assert empty == {
        "slot": "block1",
        "stage": "DORMANT",
        "blueprint": None,
        "ramp": [0.0, 1.0, 1, "linear"],
        "age": 0,
        "ticks_in_stage": 0,
    }
    assert full == {
        "slot": "block2",
        "stage": "BLENDING",
        "blueprint": "depthwise",
        "ramp": [0.0, 0.7, 5, "sigmoid12"],
        "age": 1,
        "ticks_in_stage": 1,
    }


@pytest.mark.parametrize("slots", [["block1"], ["block1", "block2", "block3"], ["block1", "block2.pool"]])
def test_a_manifest_of_other_slots_is_refused_with_both_lists(slots: list[str]) -> None:
    here = small_cnn(["block1", "block2"])
    with pytest.raises(ValueError) as refusal:
        rebuild(here, manifest(small_cnn(slots)))
    expected = f"the manifest is of a network with slots {slots}, this one has ['block1', 'block2']"
    assert str(refusal.value) == expected


def test_an_unknown_blueprint_in_a_manifest_is_refused() -> None:
    network = small_cnn()
    grow(slot_named(network, "block1.pool"), Stage.TRAINING)
    structure = manifest(network)
    structure[0]["blueprint"] = "conv_lite"
    with pytest.raises(ValueError, match="unknown blueprint 'conv_lite'; did you mean 'conv_light'"):
        rebuild(small_cnn(), structure)


def test_neither_germination_nor_rebuilding_draws_from_the_global_generator() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    carried_over(grown_cnn(), small_cnn(SLOTS, seed=99))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_has_its_hosts_precision() -> None:
    slot = SeedSlot("block1", "image", 4).double()
    germinate(slot, "conv_small", FULL, seeded())
    x = torch.randn(1, 4, 2, 2, dtype=torch.float64)
    assert torch.equal(slot(x), x)
    assert {p.dtype for p in slot.parameters()} == {torch.float64}


def test_a_seed_is_born_into_its_hosts_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))
    registry.register("dropout", {"image"}, lambda c: c * c + c)(
        lambda c: nn.Sequential(nn.Conv2d(c, c, 1), nn.Dropout(0.5))
    )
    network = small_cnn()
    germinate(slot_named(network, "block1.pool"), "dropout", FULL, seeded())
    copy = small_cnn().eval()
    rebuild(copy, manifest(network))
    assert not any(module.training for module in slot_named(copy, "block1.pool").seed.modules())
