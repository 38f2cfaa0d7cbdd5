"""Saving and loading of grown networks as files; damaged files are refused, and leave the network as it was."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from esper_lightning.blueprints import registry
from esper_lightning.growth.alpha import DEFAULT_RAMP
from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.lifecycle import germinate, slots_of
from esper_lightning.growth.manifest import manifest, rebuild
from esper_lightning.growth.recorded import weights_of
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
from tests.growth.saved import edit_growth, read_saved, write_saved
from tests.runs import ROOT


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
    path = tmp_path / "runs" / "grown"  # the folder is created by save
    save(network, path)
    load(fresh, str(path))
    assert same(network, fresh, small_batch()[0])


def test_loading_replaces_whatever_had_grown_and_saving_overwrites(tmp_path: Path) -> None:
    network, other = grown_cnn(), small_cnn(SLOTS, seed=99)
    for name in SLOTS:
        grow(slot_named(other, name), Stage.FOSSILIZED, "conv_heavy")
    save(other, tmp_path / "grown")
    save(network, tmp_path / "grown")
    load(other, tmp_path / "grown")
    assert same(network, other, small_batch()[0])


def test_the_file_is_plain_tensors_and_json_that_need_no_trust(tmp_path: Path) -> None:
    network = grown_cnn()
    save(network, tmp_path / "grown")
    growth, weights = read_saved(tmp_path / "grown")
    assert growth == {"format": 2, "attached": [], "slots": manifest(network)}
    assert {name: value.tolist() for name, value in weights.items()} == {
        name: value.tolist() for name, value in weights_of(network).items()
    }
    assert [file.name for file in tmp_path.iterdir()] == ["grown"]


class Tied(nn.Module):
    """Two layers that share a transposed weight, beside a number without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).T)
        self.register_buffer("step", torch.tensor(7))


def test_weights_that_share_memory_or_lie_apart_in_it_are_saved(tmp_path: Path) -> None:
    network, fresh = Tied(), Tied()
    save(network, tmp_path / "grown")
    fresh.step.zero_()
    load(fresh, tmp_path / "grown")
    assert fresh.a.weight is fresh.b.weight
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in network.state_dict().items())


def test_a_network_is_loaded_in_its_own_precision_if_nothing_but_rounding_is_lost(tmp_path: Path) -> None:
    save(grown_pair().double(), tmp_path / "grown")
    fresh = small_cnn(["block1", "block2"], seed=9)
    load(fresh, tmp_path / "grown")
    assert {value.dtype for value in weights_of(fresh).values()} == {torch.float32, torch.int64}
    growth, weights = read_saved(tmp_path / "grown")
    write_saved(tmp_path / "grown", growth, {n: v.to(torch.complex64) for n, v in weights.items()})
    check_refused_and_unchanged(lambda network: load(network, tmp_path / "grown"), "torch.complex64, not torch.")


class WithExtraState(nn.Linear):
    """Layer whose state is not tensors alone."""

    def get_extra_state(self) -> Any:
        return {"scale": 1}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("nothing is loaded")


def test_what_cannot_be_saved_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="_extra_state is a dict; only networks whose state is tensors"):
        save(WithExtraState(2, 2), tmp_path / "grown")
    with pytest.raises(ValueError, match="is a folder; name a file"):
        save(nn.Linear(2, 2), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = grown_pair()
    save(network, tmp_path / "grown")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        save(small_cnn(["block1", "block2"]), tmp_path / "grown")
    fresh = small_cnn(["block1", "block2"], seed=3)
    load(fresh, tmp_path / "grown")
    assert same(network, fresh, small_batch()[0])
    assert [file.name for file in tmp_path.iterdir()] == ["grown"]


def with_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    growth, weights = read_saved(path)
    change(weights)
    write_saved(path, growth, weights)


def cut_to(share: float) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def with_metadata(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(safetensors.torch.save(read_saved(path)[1], {"growth": text}))


def with_header_length(length: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (Path.unlink, "there is no file"),
    "a folder": (folder_instead, "there is no file"),
    "nothing": (lambda path: path.write_bytes(b""), "is damaged or no safetensors file"),
    "a text": (lambda path: path.write_bytes(b"hello"), "is damaged or no safetensors file"),
    "a header": (cut_to(0.1), "is damaged or no safetensors file"),
    "half": (cut_to(0.5), "is damaged or no safetensors file"),
    "all but a byte": (cut_to(0.9999), "is damaged or no safetensors file"),
    "one byte more": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "is damaged or no safetensors file"),
    "a header of 2^63 bytes": (with_header_length(2**63), "is damaged or no safetensors file"),
    "no metadata": (lambda path: path.write_bytes(safetensors.torch.save(read_saved(path)[1])), "no grown network"),
    "half the JSON": (with_metadata('{"format": 2, '), "no grown network"),
    "JSON nested without end": (with_metadata("[" * 100_000), "no grown network"),
    "a list": (with_metadata("[]"), "is not of format 2"),
    "another format": (lambda path: edit_growth(path, lambda g: g.update(format=1)), "is not of format 2"),
    "no format": (lambda path: edit_growth(path, lambda g: g.pop("format")), "is not of format 2"),
    "no slots": (lambda path: edit_growth(path, lambda g: g.pop("slots")), "it lacks a list"),
    "a damaged slot": (lambda path: edit_growth(path, lambda g: g["slots"][0].update(age=-1)), "'block1'"),
    "a ramp without end": (
        lambda path: edit_growth(path, lambda g: g["slots"][0].update(ramp=[0.0, 1.0, 10**400, "linear"])),
        "'block1'.*damaged.*ramp is",
    ),
    "another network's slots": (lambda path: save(small_cnn(["block1"]), path), "this one has"),
    "a weight less": (
        lambda path: with_weights(path, lambda w: w.pop("convs.1.weight")),
        r"is of another network: 'convs.1.weight' is missing in the file and \[8, 4, 3, 3\] in the network$",
    ),
    "a weight more": (
        lambda path: with_weights(path, lambda w: w.update(more=torch.zeros(1))),
        r"'more' is \[1\] in the file and missing in the network$",
    ),
    "weights of another network": (
        lambda path: write_saved(path, read_saved(path)[0], small_cnn(["block1", "block2"], base=8).state_dict()),
        r"'convs.0.weight' is \[8, 1, 3, 3\] in the file and \[4, 1, 3, 3\] in the network; \d+ more differ$",
    ),
}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [pytest.param(*case, id=name) for name, case in SPOILT.items()],
)
def test_a_spoilt_file_is_refused_in_one_line_and_the_network_stays_as_it_was(
    spoil: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    save(grown_pair(), tmp_path / "grown")
    spoil(tmp_path / "grown")
    check_refused_and_unchanged(lambda network: load(network, tmp_path / "grown"), message)


def test_a_load_that_is_interrupted_leaves_the_network_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(grown_pair(), tmp_path / "grown")

    def interrupted(network: nn.Module) -> None:
        load_state_dict, calls = network.load_state_dict, []

        def interrupt_once(state: dict[str, Any]) -> Any:
            calls.append(state)
            if len(calls) == 1:
                floats = {name: value for name, value in state.items() if value.is_floating_point()}
                load_state_dict(state | {name: torch.zeros_like(value) for name, value in floats.items()})
                raise KeyboardInterrupt
            return load_state_dict(state)

        monkeypatch.setattr(network, "load_state_dict", interrupt_once)
        try:
            load(network, tmp_path / "grown")
        except KeyboardInterrupt:
            raise ValueError("interrupted") from None

    check_refused_and_unchanged(interrupted, "interrupted")


def drop(key: str) -> Callable[[list[Any]], Any]:
    return lambda attached: attached[1].pop(key)


def linear_host(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def parts(network: nn.Module) -> tuple[list[str], int]:
    """Return the names of the network's modules and the number of their hooks."""
    return [name for name, _ in network.named_modules()], sum(len(m._forward_hooks) for m in network.modules())


@pytest.mark.parametrize(
    "damage",
    [
        *[drop(key) for key in ("slot", "module", "path", "channels_last", "layout", "width", "isolate", "trunk")],
        lambda attached: attached.__setitem__(1, 3),
        lambda attached: attached[1].update(slot=4),
        lambda attached: attached[1].update(slot=["0"]),
        lambda attached: attached[1].update(module=7),
        lambda attached: attached[1].update(module=""),
        lambda attached: attached[1].update(module="nosuch"),
        lambda attached: attached[1].update(path=3),
        lambda attached: attached[1].update(path=[1.5]),
        lambda attached: attached[1].update(path=[0] * 100_000),
        lambda attached: attached[1].update(trunk="no"),
        lambda attached: attached[1].update(layout="nosuch"),
        *[lambda attached, width=width: attached[1].update(width=width) for width in (0, -1, 6.0, True, 2**70)],
        lambda attached: attached.append(attached[1]),
        lambda attached: attached.append(attached[1] | {"slot": "at/1"}),
        lambda attached: attached.extend([attached[1]] * 20_000),
        lambda attached: attached.extend(attached[1] | {"slot": f"{i}"} for i in range(2, 20_000)),
    ],
)
def test_damaged_places_of_attached_slots_are_refused_and_nothing_is_attached(
    damage: Callable[[list[Any]], Any], tmp_path: Path
) -> None:
    network, fresh = linear_host(), linear_host()
    attach_slots(network, ["0", "1"], torch.randn(2, 5))
    save(network, tmp_path / "grown")
    edit_growth(tmp_path / "grown", lambda growth: damage(growth["attached"]))
    before = parts(fresh)
    with pytest.raises(ValueError) as refusal:
        load(fresh, tmp_path / "grown")
    assert len(str(refusal.value)) < 1000
    assert parts(fresh) == before


@pytest.mark.parametrize("blueprint", ["norm", "lora", "mlp"])
@pytest.mark.parametrize("width", [7, 9_000, 2**20])
def test_a_seed_that_is_wider_than_its_weights_is_refused_before_memory_is_taken(
    width: int, blueprint: str, tmp_path: Path
) -> None:
    network, fresh = linear_host(), linear_host()
    grow(attach_slots(network, ["1"], torch.randn(2, 5))["1"], Stage.FOSSILIZED, blueprint)
    save(network, tmp_path / "grown")

    def widen(growth: dict[str, Any]) -> None:
        growth["attached"][0]["width"] = growth["slots"][0]["width"] = width

    edit_growth(tmp_path / "grown", widen)
    before, peak = parts(fresh), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="is of another network"):
        load(fresh, tmp_path / "grown")
    assert parts(fresh) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**16  # KiB


def test_attached_slots_that_cannot_be_loaded_are_taken_away_again(tmp_path: Path) -> None:
    network = linear_host()
    grow(attach_slots(network, ["1"], torch.randn(2, 5))["1"], Stage.FOSSILIZED, "lora")
    save(network, tmp_path / "grown")
    for wrong in (linear_host(width=7), nn.Sequential(nn.Linear(5, 6))):
        before, weights = parts(wrong), deepcopy(wrong.state_dict())
        with pytest.raises(ValueError):
            load(wrong, tmp_path / "grown")
        assert parts(wrong) == before
        assert all(torch.equal(wrong.state_dict()[name], value) for name, value in weights.items())


SAVES_FOREVER = """
import sys, torch
from pathlib import Path
from esper_lightning.growth import save
from tests.growth.rebuilt import grown_pair
from tests.growth.grown import small_cnn
torch.set_num_threads(1)
networks = grown_pair(), small_cnn(["block1", "block2"])
while True:
    for network in networks:
        save(network, sys.argv[1])
        print("saved", flush=True)
"""


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_one_of_two_whole_networks(tmp_path: Path) -> None:
    """Two networks of different growth are saved in turn to one file, by two processes, which are killed 20 times."""
    path, chance, networks = tmp_path / "grown", Random(0), (grown_pair(), small_cnn(["block1", "block2"]))
    for _ in range(10):
        command = [sys.executable, "-c", SAVES_FOREVER, str(path)]
        savers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
        for saver in savers:
            assert saver.stdout.readline() == b"saved\n"
        for saver in savers:
            time.sleep(chance.uniform(0.0, 0.02))
            saver.send_signal(signal.SIGKILL)
            saver.communicate()
        fresh = small_cnn(["block1", "block2"], seed=9)
        load(fresh, path)
        assert any(same(deepcopy(network), deepcopy(fresh), small_batch()[0]) for network in networks)
    save(networks[0], path)
    assert [file.name for file in tmp_path.iterdir()] == ["grown"]  # drafts of killed processes are gone
