"""A grown network rebuilt from manifest and state dict has the same outputs and learns alike."""

import pytest
import torch

from esper_lightning.blueprints import blueprint_names
from esper_lightning.growth.blend import BlendStyle
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.lifecycle import auto_transition, retarget_alpha, slots_of
from esper_lightning.growth.manifest import manifest, rebuild
from esper_lightning.growth.slot import Layout
from esper_lightning.growth.stages import Stage
from tests.growth.grown import (
    LAYOUTS,
    LIFE,
    SLOTS,
    STYLES,
    batch_of,
    evidence_of,
    grow,
    host_of,
    loss_of,
    slot_named,
    small_batch,
    small_cnn,
)
from tests.growth.rebuilt import RAMP, grown_cnn, rebuild_from, same


def test_a_rebuilt_network_says_and_learns_exactly_the_same() -> None:
    network = grown_cnn()
    copy = rebuild_from(network, small_cnn(SLOTS, seed=99))
    assert same(network, copy, small_batch()[0])
    for each in (network.train(), copy.train()):
        loss_of(each).backward()
    pairs = zip(network.named_parameters(), copy.named_parameters(), strict=True)
    assert all(a == b and torch.equal(p.grad, q.grad) for (a, p), (b, q) in pairs)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("stage", LIFE, ids=lambda stage: stage.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_and_style_is_rebuilt(layout: Layout, stage: Stage, style: BlendStyle) -> None:
    network = host_of(layout)
    slot = next(iter(slots_of(network).values()))
    grow(slot, stage, "norm", RAMP, style=style)
    slot.end_epoch()
    slot.end_epoch()
    copy = rebuild_from(network, host_of(layout, seed=99))
    rebuilt = next(iter(slots_of(copy).values()))
    assert same(network, copy, batch_of(layout)[0])
    assert rebuilt.alpha.item() == slot.alpha.item()
    assert rebuilt.alpha_velocity == slot.alpha_velocity
    slot.end_epoch()
    rebuilt.end_epoch()
    assert same(network, copy, batch_of(layout)[0])


@pytest.mark.parametrize("stage", [Stage.DORMANT, Stage.CULLED, Stage.EMBARGOED], ids=lambda stage: stage.name)
def test_an_empty_slot_is_rebuilt_with_its_stage_and_time(stage: Stage) -> None:
    network, copy = small_cnn(["block1"]), small_cnn(["block1"])
    slot_named(network, "block1").stage = stage
    slot_named(network, "block1").end_epoch()
    grow(slot_named(copy, "block1"), Stage.FOSSILIZED)
    rebuild(copy, manifest(network))
    assert manifest(copy) == manifest(network)
    assert slot_named(copy, "block1").stage is stage
    assert list(slot_named(copy, "block1").parameters()) == []


@pytest.mark.parametrize(
    ("layout", "blueprint"), [(layout, name) for layout in LAYOUTS for name in blueprint_names(layout)]
)
def test_every_blueprint_is_rebuilt(layout: Layout, blueprint: str) -> None:
    network = host_of(layout)
    grow(next(iter(slots_of(network).values())), Stage.FOSSILIZED, blueprint)
    inputs = batch_of(layout)[0]
    assert same(network, rebuild_from(network, host_of(layout, seed=99)), inputs)
    assert not torch.equal(host_of(layout).eval()(inputs), network.eval()(inputs))  # the seed has an effect


def test_rebuilding_replaces_whatever_had_grown() -> None:
    network, other = grown_cnn(), small_cnn(SLOTS, seed=5)
    for name in SLOTS:
        grow(slot_named(other, name), Stage.FOSSILIZED, "conv_heavy")
    assert same(network, rebuild_from(network, other), small_batch()[0])


def test_a_rebuilt_seed_goes_on_along_its_ramp() -> None:
    network = grown_cnn()
    copy = rebuild_from(network, small_cnn(SLOTS, seed=99))
    lives = []
    for each in (network, copy):
        slot, seen = slot_named(each, "block2"), []
        assert slot.stage is Stage.BLENDING
        for _ in range(4):
            slot.end_epoch()
            events = auto_transition(slot, evidence_of(slot), LifecycleConfig(), horizon=50)
            seen.append((slot.stage, slot.alpha.item(), slot.alpha_velocity, slot.age, events))
        lives.append(seen)
    assert lives[0] == lives[1]
    assert lives[0][-1][0] is Stage.PROBATIONARY


def test_a_rebuilt_seed_goes_on_fading() -> None:
    network, copy = small_cnn(), small_cnn(seed=9)
    slot = slot_named(network, "block1.pool")
    grow(slot, Stage.PROBATIONARY)
    retarget_alpha(slot, 0.0, 4, curve="linear")
    slot.end_epoch()
    slot = slot_named(rebuild_from(network, copy), "block1.pool")
    lived = []
    for _ in range(2):
        alpha = slot.alpha.item()
        slot.end_epoch()
        lived.append(
            (alpha, [event.cause for event in auto_transition(slot, evidence_of(slot), LifecycleConfig(), horizon=50)])
        )
    assert lived == [(0.5, []), (0.25, ["faded out"])]


def test_the_manifest_alone_restores_alpha() -> None:
    network, copy = grown_cnn(), small_cnn(SLOTS)
    rebuild(copy, manifest(network))
    alphas = [[slot.alpha.item() for slot in slots_of(each).values()] for each in (network, copy)]
    assert alphas[0] == alphas[1]
    assert len(set(alphas[0])) == 3  # start, middle and target of the ramp


def test_a_manifest_is_plain_and_tells_the_story() -> None:
    network = small_cnn(["block1", "block2"])
    grow(slot_named(network, "block2"), Stage.BLENDING, "depthwise", RAMP, style="multiply")
    slot_named(network, "block2").end_epoch()
    empty, full = manifest(network)
    assert empty == {
        "slot": "block1",
        "layout": "image",
        "width": 4,
        "stage": "DORMANT",
        "blueprint": None,
        "style": "add",
        "ramp": [0.0, 1.0, 1, "linear"],
        "ramp_ticks": 0,
        "age": 0,
        "ticks_in_stage": 0,
        "folded": None,
    }
    assert full == {
        "slot": "block2",
        "layout": "image",
        "width": 8,
        "stage": "BLENDING",
        "blueprint": "depthwise",
        "style": "multiply",
        "ramp": [0.0, 0.7, 5, "sigmoid12"],
        "ramp_ticks": 1,
        "age": 1,
        "ticks_in_stage": 1,
        "folded": None,
    }
