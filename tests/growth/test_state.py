"""A state dict tells the whole network: loaded into any state of it, it gives the outputs that it was saved with."""

import io
import pickle
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from esper_lightning.growth.attach import attach_from_state_dict, attach_slots, detach_slots
from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.export import load, save
from esper_lightning.growth.lifecycle import cull, slots_of
from esper_lightning.growth.slot import EXTRA_STATE, SeedSlot, decode, encode, new_folded
from esper_lightning.growth.stages import Stage
from tests.growth.by_hand import growing
from tests.growth.grown import add_noise, grow, images, outputs_in_both_modes, same, small_network, story

HALF = Ramp(4)

PLACES, SLOT = f"grown_slots.{EXTRA_STATE}", f"grown_slots.at/2.{EXTRA_STATE}"


def with_slots() -> nn.Sequential:
    network = small_network()
    attach_slots(network, ["2", "5"], images())
    return network


def nothing(slots: dict[str, SeedSlot]) -> None:
    pass


def learning(slots: dict[str, SeedSlot]) -> None:
    grow(slots["2"], Stage.TRAINING, "conv_heavy", seed=1)


def blending(slots: dict[str, SeedSlot]) -> None:
    grow(slots["2"], Stage.BLENDING, "conv_light", HALF, seed=2)
    slots["2"].end_epoch()
    grow(slots["5"], Stage.PROBATIONARY, "mlp_small", seed=3)


def kept(slots: dict[str, SeedSlot]) -> None:
    grow(slots["2"], Stage.FOSSILIZED, "conv_light", seed=4)


def culled(slots: dict[str, SeedSlot]) -> None:
    grow(slots["5"], Stage.BLENDING, "lora", HALF)
    cull(slots["5"])


def folded(slots: dict[str, SeedSlot]) -> None:
    slots["2"].folded = new_folded(slots["2"], 3)
    add_noise(slots["2"].folded)


STATES = [nothing, learning, blending, kept, culled, folded]


def network_in(state: Callable[[dict[str, SeedSlot]], None], seed: int = 0) -> nn.Sequential:
    network = with_slots()
    add_noise(network, seed)
    state(slots_of(network))
    network.train()(images())  # moves BatchNorm's statistics
    return network


def saved(network: nn.Module) -> dict[str, Any]:
    """Return the state dict after it went through a file."""
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.thinned(5)
@pytest.mark.parametrize(("source", "target"), [*product(STATES, STATES)])
def test_a_state_dict_loaded_into_any_state_of_the_network_gives_the_outputs_it_was_saved_with(
    source: Callable[[dict[str, SeedSlot]], None], target: Callable[[dict[str, SeedSlot]], None]
) -> None:
    network, other = network_in(source, 1), network_in(target, 2)
    state = saved(network)
    expected = outputs_in_both_modes(deepcopy(network), images())
    random_state = torch.get_rng_state()

    other.load_state_dict(state)

    assert source is folded or torch.equal(torch.get_rng_state(), random_state)
    assert list(other.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    found = outputs_in_both_modes(deepcopy(other), images())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_network_gets_the_slots_that_a_state_dict_tells_of() -> None:
    network = nn.ModuleDict({"model": network_in(blending)})
    fresh = nn.ModuleDict({"model": small_network()})
    state = saved(network)
    for _ in range(2):  # the second time they are there
        attach_from_state_dict(fresh["model"], state, "model.")
    fresh.load_state_dict(state)
    assert same(network["model"], fresh["model"], images())
    attach_from_state_dict(plain := small_network(), small_network().state_dict())
    assert slots_of(plain) == {}


def test_weights_from_before_the_slots_fit_empty_slots_and_are_no_whole_state_of_seeds() -> None:
    weights = small_network().state_dict()
    with_slots().load_state_dict(weights)
    network = network_in(kept)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "grown_slots\.at/2\._extra_state"'):
        network.load_state_dict(weights)
    before = story(network)
    network.load_state_dict({"0.weight": torch.zeros_like(network[0].weight)}, strict=False)
    assert story(network) == before
    assert not network[0].weight.any()


def test_a_copy_of_a_network_restores_itself_and_not_the_original() -> None:
    network = network_in(kept, 1)
    state = saved(network_in(blending, 2))
    for each in (deepcopy(network), pickle.loads(pickle.dumps(network))):
        each.load_state_dict(state)
        assert each.state_dict().keys() == state.keys()
        detach_slots(each)
        each.load_state_dict(small_network().state_dict())
    assert story(network) == story(network_in(kept, 1))


def moved(state: dict[str, Any]) -> dict[str, Any]:
    return {PLACES: encode([place | {"module": "1"} for place in decode(state[PLACES])])}


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    return {SLOT: encode(decode(state[SLOT]) | {"blueprint": "conv_lite"})}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (moved, ValueError, "slot '2' was attached elsewhere"),
        (renamed, ValueError, "unknown blueprint 'conv_lite'|no blueprint 'conv_lite'"),
        (lambda state: {"grown_slots.at/2.seed.more": torch.zeros(3)}, RuntimeError, r"Unexpected key\(s\)"),
        (lambda state: {"grown_slots.at/2.seed.body.0.weight": torch.zeros(3)}, RuntimeError, "size mismatch"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], error: type[Exception], message: str
) -> None:
    state = saved(network_in(blending, 1))
    with pytest.raises(error, match=message):
        network_in(nothing).load_state_dict(state | change(state))


def test_a_seed_in_a_slot_that_the_network_lacks_is_refused() -> None:
    network = small_network()
    attach_slots(network, ["5"], images())
    with pytest.raises(ValueError, match="the state has slot '2', which the network lacks; attach it before"):
        network.load_state_dict(saved(network_in(kept)))


def test_an_optimizer_of_other_seeds_is_refused() -> None:
    saved, other = growing(), growing()
    saved.germinate("block1", "norm")
    other.germinate("block2.pool", "norm")
    with pytest.raises(ValueError, match=r"the saved optimizer has the groups \['', 'seed.block1'\], this one has"):
        other.optimizer.load_state_dict(saved.optimizer.state_dict())


# Files of `save`.


def test_a_network_that_was_saved_is_loaded_into_a_fresh_or_another_one(tmp_path: Path) -> None:
    network = network_in(blending)
    path = tmp_path / "runs" / "grown"  # the folder is created by save
    for each in (network_in(kept), network):  # the second file replaces the first
        save(each, path)
    for other in (small_network(), network_in(folded), small_network().double()):
        load(other, str(path))
        assert same(deepcopy(network), other.float(), images())
    assert [file.name for file in path.parent.iterdir()] == ["grown"]


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


def cut_to(share: float) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (Path.unlink, "there is no file"),
    "a text": (lambda path: path.write_bytes(b"hello"), "is damaged or no safetensors file"),
    "half": (cut_to(0.5), "is damaged or no safetensors file"),
    "a weight more": (
        lambda path: path.write_bytes(
            safetensors.torch.save(safetensors.torch.load_file(path) | {"more": torch.zeros(1)})
        ),
        r'is of another network: Error\(s\) in loading state_dict for Sequential: Unexpected key\(s\).*"more"',
    ),
    "another network": (lambda path: save(nn.Sequential(nn.Linear(2, 2)), path), r"is of another network: .*Missing"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILT.values(), ids=list(SPOILT))
def test_a_file_that_does_not_fit_is_refused_in_one_line_and_the_network_stays_as_it_was(
    spoil: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    save(network_in(blending, 1), tmp_path / "grown")
    spoil(tmp_path / "grown")
    for network in (network_in(kept, 2), small_network()):
        before, state = story(network), deepcopy(network.state_dict())
        with pytest.raises(ValueError, match=message) as refusal:
            load(network, tmp_path / "grown")
        assert "\n" not in str(refusal.value)
        assert story(network) == before
        assert list(network.state_dict()) == list(state)
        assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
