"""A grown network is rebuilt exactly from its manifest and its state dict, in memory or in a folder."""

import io
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.blueprints import names, registry
from esper_lightning.growth.alpha import FULL, Ramp
from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.blend import Style
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.manifest import manifest, rebuild
from esper_lightning.growth.network import aim, cull, elapse, germinate, slots_of
from esper_lightning.growth.saving import load, save
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.growth.grown import (
    CPU,
    LAYOUTS,
    LIFE,
    SLOTS,
    STYLES,
    batch_of,
    evidence_of,
    grow,
    host_of,
    loss_of,
    seeded,
    slot_named,
    small_batch,
    small_cnn,
)

RAMP = Ramp(start=0.0, target=0.7, ticks=5, curve="sigmoid12")


def grown_cnn() -> CNN:
    """A host whose six slots are in six different stages; one of them is in the middle of its ramp."""
    network = small_cnn(SLOTS)
    stages = [*LIFE, Stage.TRAINING]
    for i, (name, stage, blueprint) in enumerate(zip(SLOTS, stages, names("image"), strict=False)):
        grow(slot_named(network, name), stage, blueprint, RAMP, style=STYLES[i % 3])
    cull(slot_named(network, "block3.pool"))
    for slot in slots_of(network).values():
        slot.tick()
        slot.tick()
    network.train()
    loss_of(network)  # moves BatchNorm's statistics
    return network


def carried_over(network: nn.Module, into: nn.Module) -> nn.Module:
    """`into`, rebuilt from what a file can hold of `network`."""
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    rebuild(into, json.loads(json.dumps(manifest(network))))
    into.load_state_dict(torch.load(file, weights_only=True))
    return into


def answers(network: nn.Module, inputs: Tensor) -> list[Tensor]:
    """What a network says in training and in evaluation mode."""
    return [network.train(mode)(inputs).detach() for mode in (True, False)]


def same(network: nn.Module, copy: nn.Module, inputs: Tensor) -> bool:
    pairs = zip(answers(network, inputs), answers(copy, inputs), strict=True)
    return manifest(network) == manifest(copy) and all(torch.equal(a, b) for a, b in pairs)


def test_a_rebuilt_network_says_and_learns_exactly_the_same() -> None:
    network = grown_cnn()
    copy = carried_over(network, small_cnn(SLOTS, seed=99))
    assert same(network, copy, small_batch()[0])
    for each in (network.train(), copy.train()):
        loss_of(each).backward()
    pairs = zip(network.named_parameters(), copy.named_parameters(), strict=True)
    assert all(a == b and torch.equal(p.grad, q.grad) for (a, p), (b, q) in pairs)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("stage", LIFE, ids=lambda stage: stage.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_and_style_is_rebuilt(layout: Layout, stage: Stage, style: Style) -> None:
    network = host_of(layout)
    slot = next(iter(slots_of(network).values()))
    grow(slot, stage, "norm", RAMP, style=style)
    slot.tick()
    slot.tick()
    copy = carried_over(network, host_of(layout, seed=99))
    rebuilt = next(iter(slots_of(copy).values()))
    assert same(network, copy, batch_of(layout)[0])
    assert rebuilt.alpha.item() == slot.alpha.item()
    assert rebuilt.alpha_velocity == slot.alpha_velocity
    slot.tick()
    rebuilt.tick()
    assert same(network, copy, batch_of(layout)[0])


@pytest.mark.parametrize("stage", [Stage.DORMANT, Stage.CULLED, Stage.EMBARGOED], ids=lambda stage: stage.name)
def test_an_empty_slot_is_rebuilt_with_its_stage_and_time(stage: Stage) -> None:
    network, copy = small_cnn(["block1"]), small_cnn(["block1"])
    slot_named(network, "block1").stage = stage
    slot_named(network, "block1").tick()
    grow(slot_named(copy, "block1"), Stage.FOSSILIZED)
    rebuild(copy, manifest(network))
    assert manifest(copy) == manifest(network)
    assert slot_named(copy, "block1").stage is stage
    assert list(slot_named(copy, "block1").parameters()) == []


@pytest.mark.parametrize(("layout", "blueprint"), [(layout, name) for layout in LAYOUTS for name in names(layout, CPU)])
def test_every_blueprint_is_rebuilt(layout: Layout, blueprint: str) -> None:
    network = host_of(layout)
    grow(next(iter(slots_of(network).values())), Stage.FOSSILIZED, blueprint)
    inputs = batch_of(layout)[0]
    assert same(network, carried_over(network, host_of(layout, seed=99)), inputs)
    assert not torch.equal(host_of(layout).eval()(inputs), network.eval()(inputs))  # the seed does matter


def test_rebuilding_replaces_whatever_had_grown() -> None:
    network, other = grown_cnn(), small_cnn(SLOTS, seed=5)
    for name in SLOTS:
        grow(slot_named(other, name), Stage.FOSSILIZED, "conv_heavy")
    assert same(network, carried_over(network, other), small_batch()[0])


def test_a_rebuilt_seed_goes_on_along_its_ramp() -> None:
    network = grown_cnn()
    copy = carried_over(network, small_cnn(SLOTS, seed=99))
    lives = []
    for each in (network, copy):
        slot, seen = slot_named(each, "block2"), []
        assert slot.stage is Stage.BLENDING
        for _ in range(4):
            slot.tick()
            events = elapse(slot, evidence_of(slot), LifecycleConfig(), horizon=50)
            seen.append((slot.stage, slot.alpha.item(), slot.alpha_velocity, slot.age, events))
        lives.append(seen)
    assert lives[0] == lives[1]
    assert lives[0][-1][0] is Stage.PROBATIONARY


def test_a_rebuilt_seed_goes_on_fading() -> None:
    network, copy = small_cnn(), small_cnn(seed=9)
    slot = slot_named(network, "block1.pool")
    grow(slot, Stage.PROBATIONARY)
    aim(slot, 0.0, 4, "linear")
    slot.tick()
    slot = slot_named(carried_over(network, copy), "block1.pool")
    lived = []
    for _ in range(2):
        alpha = slot.alpha.item()
        slot.tick()
        lived.append((alpha, [event.cause for event in elapse(slot, evidence_of(slot), LifecycleConfig(), 50)]))
    assert lived == [(0.5, []), (0.25, ["faded out"])]


def test_the_manifest_alone_restores_alpha() -> None:
    network, copy = grown_cnn(), small_cnn(SLOTS)
    rebuild(copy, manifest(network))
    alphas = [[slot.alpha.item() for slot in slots_of(each).values()] for each in (network, copy)]
    assert alphas[0] == alphas[1]
    assert len(set(alphas[0])) == 3  # nothing, part of the way, and the target


def test_a_manifest_is_plain_and_tells_the_story() -> None:
    network = small_cnn(["block1", "block2"])
    grow(slot_named(network, "block2"), Stage.BLENDING, "depthwise", RAMP, style="multiply")
    slot_named(network, "block2").tick()
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


@pytest.mark.parametrize("slots", [["block1"], ["block1", "block2", "block3"], ["block1", "block2.pool"]])
def test_a_manifest_of_other_slots_is_refused_with_both_lists(slots: list[str]) -> None:
    here, there = small_cnn(["block1", "block2"]), small_cnn(slots)
    with pytest.raises(ValueError) as refusal:
        rebuild(here, manifest(there))
    message = f"the manifest is of a network with slots {slots}, this one has ['block1', 'block2']"
    assert str(refusal.value) == message


def test_a_manifest_of_the_same_slots_in_another_order_is_refused() -> None:
    here = small_cnn(["block1", "block2"])
    message = r"slots \['block2', 'block1'\], this one has \['block1', 'block2'\]$"
    with pytest.raises(ValueError, match=message):
        rebuild(here, manifest(here)[::-1])


@pytest.mark.parametrize(
    ("here", "there", "difference"),
    [
        (small_cnn(["block1"]), small_cnn(["block1"], base=8), "width is 8, the slot's is 4"),
        (
            SeedSlot("block1", "sequence", 4),
            SeedSlot("block1", "vector", 4),
            "layout is 'vector', the slot's is 'sequence'",
        ),
    ],
    ids=["width", "layout"],
)
def test_a_manifest_of_another_slot_of_that_name_is_refused(here: nn.Module, there: nn.Module, difference: str) -> None:
    with pytest.raises(ValueError) as refusal:
        rebuild(here, manifest(there))
    message = f"slot 'block1': the manifest's entry is damaged or of another version: {difference}"
    assert str(refusal.value) == message


DAMAGES: list[Any] = [
    {"stage": "SLEEPING"},
    {"stage": 3},
    {"stage": None},
    {"style": "sum"},
    {"style": ["add"]},
    {"blueprint": 7},
    {"ramp": None},
    {"ramp": "linear"},
    {"ramp": [0.0, 1.0, 5]},
    {"ramp": [0.0, 1.5, 5, "linear"]},
    {"ramp": [-0.1, 1.0, 5, "linear"]},
    {"ramp": [0.0, float("nan"), 5, "linear"]},
    {"ramp": ["0", 1.0, 5, "linear"]},
    {"ramp": [0.0, 1.0, 5.0, "linear"]},
    {"ramp": [0.0, 1.0, True, "linear"]},
    {"ramp": [0.0, 1.0, 5, "parabola"]},
    {"ramp_ticks": -1},
    {"ramp_ticks": True},
    {"age": -1},
    {"age": True},
    {"age": 2.0},
    {"age": "2"},
    {"ticks_in_stage": None},
    {"folded": 2},
    {"folded": "3"},
    {"stage": ["TRAINING"]},
    {"ramp": [0.0, 1.0, 5, ["linear"]]},
    {"ramp": [True, True, 5, "linear"]},
    {"ramp": [0.0, 1.0, -5, "linear"]},
    {"folded": True},
    {"blueprint": None},  # a seed in TRAINING must be of some kind
    {"blueprint": "conv_lite"},
    {"blueprint": "mlp"},  # known, but not on images
    {"stage": "DORMANT"},  # with a blueprint
    {"layout": "vector"},
    {"layout": None},
    {"width": 4},
    {"width": 8.0},
    {"width": "8"},
]


def grown_pair() -> CNN:
    network = small_cnn(["block1", "block2"])
    grow(slot_named(network, "block1"), Stage.BLENDING, "norm", RAMP)
    grow(slot_named(network, "block2"), Stage.TRAINING, "conv_small", RAMP)
    return network


def check_refused_and_unchanged(attempt: Callable[[nn.Module], None], message: str) -> None:
    """`attempt` on a grown network must end in a ValueError of one line, with no trace."""
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


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_damaged_entry_is_refused_by_name_and_changes_nothing(damage: dict[str, Any]) -> None:
    structure = manifest(grown_pair())
    structure[1].update(damage)
    check_refused_and_unchanged(
        lambda network: rebuild(network, structure),
        "^slot 'block2': the manifest's entry is damaged or of another version: ",
    )


@pytest.mark.parametrize("layout", ["sequence", "vector"])
def test_only_a_slot_of_images_may_hold_something_folded(layout: Layout) -> None:
    structure = manifest(host_of(layout))
    structure[1]["folded"] = 3
    with pytest.raises(ValueError, match="slot 'second': the manifest's entry is damaged"):
        rebuild(host_of(layout), structure)


@pytest.mark.parametrize("key", [key for key in manifest(grown_pair())[1] if key != "slot"])
def test_an_entry_with_something_missing_is_refused_by_name_and_changes_nothing(key: str) -> None:
    structure = manifest(grown_pair())
    del structure[1][key]
    check_refused_and_unchanged(
        lambda network: rebuild(network, structure),
        f"^slot 'block2': the manifest's entry is damaged or of another version: {key} is 'missing'",
    )


def test_an_entry_that_does_not_say_of_which_slot_it_is_is_refused() -> None:
    structure = manifest(grown_pair())
    del structure[1]["slot"]
    check_refused_and_unchanged(
        lambda network: rebuild(network, structure),
        r"^the manifest is of a network with slots \['block1', None\], this one has \['block1', 'block2'\]$",
    )


@pytest.mark.parametrize("structure", [[], {}, None, 3, "abc", [1], ["block1"], {"a": 1}], ids=str)
def test_what_is_no_manifest_is_refused_and_changes_nothing(structure: Any) -> None:
    check_refused_and_unchanged(lambda network: rebuild(network, structure), "manifest")


def test_neither_germination_nor_rebuilding_draws_from_the_global_generator() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    carried_over(grown_cnn(), small_cnn(SLOTS, seed=99))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_has_its_hosts_precision() -> None:
    network, copy = host_of("vector").double(), host_of("vector", seed=9).double()
    for slot in slots_of(network).values():
        germinate(slot, "mlp", FULL, seeded(), style="gate")
    rebuild(copy, manifest(network))
    assert {p.dtype for each in (network, copy) for p in each.parameters()} == {torch.float64}


def test_a_seed_is_born_into_its_hosts_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))
    registry.register("dropout", {"image"}, lambda c: c * c + c, lambda c, n: 0)(
        lambda c: nn.Sequential(nn.Conv2d(c, c, 1), nn.Dropout(0.5))
    )
    network = small_cnn()
    germinate(slot_named(network, "block1.pool"), "dropout", FULL, seeded(), birth="random")
    assert all(module.training for module in slot_named(network, "block1.pool").seed.modules())
    copy = small_cnn().eval()
    rebuild(copy, manifest(network))  # though it could not begin as the identity
    assert not any(module.training for module in slot_named(copy, "block1.pool").seed.modules())


def test_a_network_that_was_saved_is_loaded_into_a_fresh_one(tmp_path: Path) -> None:
    network, fresh = grown_cnn(), small_cnn(SLOTS, seed=99)
    folder = tmp_path / "runs" / "grown"  # made as needed
    save(network, folder)
    load(fresh, str(folder))
    assert same(network, fresh, small_batch()[0])


def test_loading_replaces_whatever_had_grown_and_saving_overwrites(tmp_path: Path) -> None:
    network, other = grown_cnn(), small_cnn(SLOTS, seed=99)
    for name in SLOTS:
        grow(slot_named(other, name), Stage.FOSSILIZED, "conv_heavy")
    save(other, tmp_path)
    save(network, tmp_path)
    load(other, tmp_path)
    assert same(network, other, small_batch()[0])


def test_the_files_are_plain_json_and_weights_that_need_no_trust(tmp_path: Path) -> None:
    network = grown_cnn()
    save(network, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["topology.json", "weights.pt"]
    topology = json.loads((tmp_path / "topology.json").read_text())
    assert topology == {"format": 1, "attached": [], "slots": manifest(network)}
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert list(weights) == list(network.state_dict())


def edit_topology(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    topology = json.loads((folder / "topology.json").read_text())
    change(topology)
    (folder / "topology.json").write_text(json.dumps(topology))


def save_weights(folder: Path, weights: Any) -> None:
    torch.save(weights, folder / "weights.pt")


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no topology": (lambda folder: (folder / "topology.json").unlink(), "holds no topology.json"),
    "no weights": (lambda folder: (folder / "weights.pt").unlink(), "holds no weights.pt"),
    "half a topology": (lambda folder: (folder / "topology.json").write_text('{"format": 1, '), "is damaged"),
    "an empty topology": (lambda folder: (folder / "topology.json").write_text(""), "is damaged"),
    "a list": (lambda folder: (folder / "topology.json").write_text("[]"), "is not of format 1"),
    "another format": (lambda folder: edit_topology(folder, lambda t: t.update(format=2)), "is not of format 1"),
    "no format": (lambda folder: edit_topology(folder, lambda t: t.pop("format")), "is not of format 1"),
    "a damaged slot": (lambda folder: edit_topology(folder, lambda t: t["slots"][0].update(age=-1)), "'block1'"),
    "another network's slots": (lambda folder: save(small_cnn(["block1"]), folder), "this one has"),
    "a topology of bytes": (lambda folder: (folder / "topology.json").write_bytes(b"\xff\xfe\x99"), "is damaged"),
    "no slots": (lambda folder: edit_topology(folder, lambda t: t.pop("slots")), "topology.json"),
    "weights of bytes": (lambda folder: (folder / "weights.pt").write_bytes(b"hello"), "weights.pt"),
    "half the weights": (
        lambda folder: (folder / "weights.pt").write_bytes((folder / "weights.pt").read_bytes()[:500]),
        "weights.pt",
    ),
    "weights that are a list": (lambda folder: save_weights(folder, [1, 2]), "weights.pt"),
    "weights of another network": (
        lambda folder: save_weights(folder, small_cnn(["block1", "block2"], base=8).state_dict()),
        "weights.pt is of another network",
    ),
}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [pytest.param(*case, id=name) for name, case in SPOILT.items()],
)
def test_a_spoilt_folder_is_refused_in_one_line_and_the_network_stays_as_it_was(
    spoil: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    save(grown_pair(), tmp_path)
    spoil(tmp_path)
    check_refused_and_unchanged(lambda network: load(network, tmp_path), message)


class Trap:
    """Would make a file if it were unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_weights_that_would_run_code_are_refused_and_run_nothing(tmp_path: Path) -> None:
    save(grown_pair(), tmp_path)
    save_weights(tmp_path, {"weight": Trap(tmp_path / "sprung")})
    message = r"weights\.pt. is truncated, damaged or of another kind \(it would make a __builtin__\.getattr\)$"
    check_refused_and_unchanged(lambda network: load(network, tmp_path), message)
    assert not (tmp_path / "sprung").exists()
    torch.load(tmp_path / "weights.pt", weights_only=False)
    assert (tmp_path / "sprung").exists()  # so the trap was one


def drop(key: str) -> Callable[[list[Any]], Any]:
    return lambda attached: attached[1].pop(key)


@pytest.mark.parametrize(
    "damage",
    [
        *[drop(key) for key in ("slot", "module", "path", "channels_last", "layout", "width", "isolate", "trunk")],
        lambda attached: attached.__setitem__(1, 3),
        lambda attached: attached[1].update(slot=4),
        lambda attached: attached[1].update(module=7),
        lambda attached: attached[1].update(path=3),
        lambda attached: attached[1].update(path=[1.5]),
        lambda attached: attached[1].update(trunk="no"),
    ],
)
def test_damaged_places_of_attached_slots_are_refused_and_nothing_is_attached(
    damage: Callable[[list[Any]], Any], tmp_path: Path
) -> None:
    def host() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    network, fresh = host(), host()
    attach_slots(network, ["0", "1"], torch.randn(2, 5))
    save(network, tmp_path)
    edit_topology(tmp_path, lambda topology: damage(topology["attached"]))
    with pytest.raises(ValueError):
        load(fresh, tmp_path)
    assert [name for name, _ in fresh.named_children()] == ["0", "1", "2"]
    assert not any(module._forward_hooks for module in fresh.modules())


def test_attached_slots_that_cannot_be_loaded_are_taken_away_again(tmp_path: Path) -> None:
    def host(width: int = 6) -> nn.Module:
        return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))

    network = host()
    grow(attach_slots(network, ["1"], torch.randn(2, 5))["1"], Stage.FOSSILIZED, "lora")
    save(network, tmp_path)
    for wrong in (host(width=7), nn.Sequential(nn.Linear(5, 6))):
        names, weights = [name for name, _ in wrong.named_modules()], deepcopy(wrong.state_dict())
        with pytest.raises(ValueError):
            load(wrong, tmp_path)
        assert [name for name, _ in wrong.named_modules()] == names
        assert not any(module._forward_hooks for module in wrong.modules())
        assert all(torch.equal(wrong.state_dict()[name], value) for name, value in weights.items())
