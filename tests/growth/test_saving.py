"""Saving and loading of grown networks as folders; damaged folders are refused."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from esper_lightning.blueprints import registry
from esper_lightning.growth.alpha import DEFAULT_RAMP
from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.lifecycle import germinate, slots_of
from esper_lightning.growth.manifest import manifest, rebuild
from esper_lightning.growth.saving import load, save
from esper_lightning.growth.stages import Stage
from tests.growth.grown import (
    SLOTS,
    generator_of,
    grow,
    host_of,
    slot_named,
    small_batch,
    small_cnn,
)
from tests.growth.rebuilt import check_refused_and_unchanged, grown_cnn, grown_pair, rebuild_from, same


def test_neither_germination_nor_rebuilding_draws_from_the_global_generator() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    rebuild_from(grown_cnn(), small_cnn(SLOTS, seed=99))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_has_its_hosts_precision() -> None:
    network, copy = host_of("vector").double(), host_of("vector", seed=9).double()
    for slot in slots_of(network).values():
        germinate(slot, "mlp", DEFAULT_RAMP, generator=generator_of(), style="gate")
    rebuild(copy, manifest(network))
    assert {p.dtype for each in (network, copy) for p in each.parameters()} == {torch.float64}


def test_a_seed_is_born_into_its_hosts_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))
    registry.register("dropout", {"image"}, parameters=lambda c: c * c + c, flops=lambda c, n: 0)(
        lambda c: nn.Sequential(nn.Conv2d(c, c, 1), nn.Dropout(0.5))
    )
    network = small_cnn()
    germinate(slot_named(network, "block1.pool"), "dropout", DEFAULT_RAMP, generator=generator_of(), birth="random")
    assert all(module.training for module in slot_named(network, "block1.pool").seed.modules())
    copy = small_cnn().eval()
    rebuild(copy, manifest(network))  # although it does not support birth "identity"
    assert not any(module.training for module in slot_named(copy, "block1.pool").seed.modules())


def test_a_network_that_was_saved_is_loaded_into_a_fresh_one(tmp_path: Path) -> None:
    network, fresh = grown_cnn(), small_cnn(SLOTS, seed=99)
    folder = tmp_path / "runs" / "grown"  # created by save
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


class WritesFileOnUnpickling:
    """Object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_weights_that_would_run_code_are_refused_and_run_nothing(tmp_path: Path) -> None:
    save(grown_pair(), tmp_path)
    save_weights(tmp_path, {"weight": WritesFileOnUnpickling(tmp_path / "sprung")})
    message = r"weights\.pt. is truncated, damaged or of another kind \(it would make a __builtin__\.getattr\)$"
    check_refused_and_unchanged(lambda network: load(network, tmp_path), message)
    assert not (tmp_path / "sprung").exists()
    torch.load(tmp_path / "weights.pt", weights_only=False)
    assert (tmp_path / "sprung").exists()  # shows that unpickling would have created the file


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
