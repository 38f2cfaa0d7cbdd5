"""A state dict tells the whole network: loaded into any state of it, it gives the outputs that it was saved with."""

import io
import json
import pickle
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import lightning
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from esper_lightning.growth.alpha import DEFAULT_RAMP, Ramp
from esper_lightning.growth.attach import attach_from_state_dict, attach_slots, detach_slots
from esper_lightning.growth.fold import fold
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.lifecycle import cull, slots_of
from esper_lightning.growth.manifest import manifest
from esper_lightning.growth.recorded import MAX_RECORD_BYTES, decode_record, encode_record
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.attached import images, small_network
from tests.growth.by_hand import EAGER
from tests.growth.grown import SLOTS, add_noise, generator_of, grow, slot_named, small_batch, small_cnn
from tests.growth.rebuilt import grown_cnn, outputs_in_both_modes, same

HALF = Ramp(0.0, 0.5, 4, "cosine")

SLOT = "grown_slots.at/2"


def with_slots() -> nn.Sequential:
    network = small_network()
    attach_slots(network, ["2", "5"], images())
    return network


def nothing(slots: dict[str, SeedSlot]) -> None:
    pass


def learning(slots: dict[str, SeedSlot]) -> None:
    grow(slots["2"], Stage.TRAINING, "conv_heavy", seed=1)


def blending(slots: dict[str, SeedSlot]) -> None:
    grow(slots["2"], Stage.BLENDING, "conv_light", HALF, seed=2, style="multiply")
    slots["2"].end_epoch()
    grow(slots["5"], Stage.PROBATIONARY, "mlp_small", seed=3, style="gate")


def kept(slots: dict[str, SeedSlot]) -> None:
    grow(slots["2"], Stage.FOSSILIZED, "conv_light", seed=4)


def culled(slots: dict[str, SeedSlot]) -> None:
    grow(slots["5"], Stage.BLENDING, "lora", HALF)
    cull(slots["5"])


def folded(slots: dict[str, SeedSlot]) -> None:
    slots["2"].folded = slots["2"].layer_for(3)
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
    other.load_state_dict(state)
    assert list(other.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    assert all(
        torch.equal(a, b) for a, b in zip(outputs_in_both_modes(deepcopy(other), images()), expected, strict=True)
    )


def test_a_state_dict_has_its_original_names_until_something_grows_and_again_when_it_is_gone() -> None:
    network = with_slots()
    names = list(small_network().state_dict())
    assert list(network.state_dict()) == names
    growing = GrowingNetwork(network, SGD(network.parameters(), lr=0.1), horizon=9, lifecycle=EAGER)
    growing.germinate("2", "norm")
    assert set(network.state_dict()) - set(names) >= {f"{SLOT}.record", "grown_slots.record"}
    growing.remove_seed("2")
    assert list(network.state_dict()) == names
    growing.germinate("2", "norm")
    detach_slots(network)
    assert list(network.state_dict()) == names


def test_safetensors_hold_the_whole_state(tmp_path: Path) -> None:
    network, other = network_in(blending, 1), network_in(kept, 2)
    safetensors.torch.save_file(network.state_dict(), tmp_path / "weights.safetensors")
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "weights.safetensors"))
    assert same(network, other, images())


def test_slots_that_a_network_has_built_in_are_restored_too() -> None:
    network, fresh = grown_cnn(), small_cnn(SLOTS, seed=9)
    slot_named(network, "block3.pool").empty()  # a state dict does not tell for how long a slot is closed after a cull
    fresh.load_state_dict(saved(network))
    assert [entry | {"ticks_in_stage": 0} for entry in manifest(fresh)] == [
        entry | {"ticks_in_stage": 0} for entry in manifest(network)
    ]
    pairs = zip(*(outputs_in_both_modes(one, small_batch()[0]) for one in (network, fresh)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_network_that_was_folded_is_restored() -> None:
    network, fresh = network_in(kept), with_slots()
    (result,) = fold(network, images())
    assert result.target_layer is not None
    fresh.load_state_dict(saved(network))
    assert same(network, fresh, images())


def test_a_network_gets_the_slots_that_a_state_dict_tells_of() -> None:
    network = nn.ModuleDict({"model": network_in(blending)})
    fresh = nn.ModuleDict({"model": small_network()})
    state = saved(network)
    attach_from_state_dict(fresh["model"], state, "model.")
    attach_from_state_dict(fresh["model"], state, "model.")  # they are there by now
    fresh.load_state_dict(state)
    assert same(network["model"], fresh["model"], images())
    attach_from_state_dict(plain := small_network(), small_network().state_dict())
    assert slots_of(plain) == {}


def test_a_state_dict_that_fits_leaves_the_parameters_where_an_optimizer_finds_them() -> None:
    network, other = network_in(blending, 1), network_in(blending, 2)
    before = [id(p) for p in other.parameters()]
    other.load_state_dict(saved(network))
    assert [id(p) for p in other.parameters()] == before


def test_a_part_of_a_state_dict_says_nothing_of_seeds_that_it_does_not_name() -> None:
    network = network_in(kept)
    before = manifest(network)
    network.load_state_dict({"0.weight": torch.zeros_like(network[0].weight)}, strict=False)
    assert manifest(network) == before
    assert not network[0].weight.any()


def test_a_copy_of_a_network_restores_itself_and_not_the_original() -> None:
    network = network_in(kept, 1)
    copies = [deepcopy(network), pickle.loads(pickle.dumps(network))]
    state = saved(network_in(blending, 2))
    for each in copies:
        each.load_state_dict(state)
        with pytest.raises(ValueError, match="'2': the manifest's entry is damaged"):
            each.load_state_dict(state | {f"{SLOT}.record": encode_record({})})
        detach_slots(each)
        each.load_state_dict(small_network().state_dict())
    assert manifest(network) == manifest(network_in(kept, 1))


def edited(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a change of the record of a slot."""
    return lambda state: {f"{SLOT}.record": encode_record(decode_record(state[f"{SLOT}.record"]) | changes)}


def moved(state: dict[str, Any]) -> dict[str, Any]:
    """Return a record of slots that were attached behind another module."""
    record = decode_record(state["grown_slots.record"])
    return {"grown_slots.record": encode_record([entry | {"module": "1"} for entry in record])}


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "no JSON": (lambda s: {f"{SLOT}.record": s[f"{SLOT}.record"][:-3]}, "is no JSON"),
    "no text": (lambda s: {f"{SLOT}.record": torch.full((9,), 255, dtype=torch.uint8)}, "is no JSON"),
    "nested": (lambda s: {f"{SLOT}.record": torch.full((100_000,), ord("["), dtype=torch.uint8)}, "is no JSON"),
    "floats": (lambda s: {f"{SLOT}.record": s[f"{SLOT}.record"].float()}, "no row of bytes"),
    "a matrix": (lambda s: {f"{SLOT}.record": s[f"{SLOT}.record"][None]}, "no row of bytes"),
    "no tensor": (lambda s: {f"{SLOT}.record": "BLENDING"}, "no row of bytes"),
    "long": (lambda s: {f"{SLOT}.record": torch.zeros(MAX_RECORD_BYTES + 1, dtype=torch.uint8)}, "are allowed"),
    "a list": (lambda s: {f"{SLOT}.record": encode_record([])}, "it is a list"),
    "a number": (edited(stage=3), "stage is 3"),
    "an empty stage": (edited(stage="DORMANT"), "stage DORMANT with blueprint 'conv_light'"),
    "another slot": (edited(slot="5"), "slot is '5'"),
    "another width": (edited(width=2**20), "width is 1048576"),
    "an unknown blueprint": (edited(blueprint="nosuch"), "no nosuch"),
    "another blueprint": (edited(blueprint="conv_heavy"), "does not fit its own record of 'conv_heavy'"),
    "another style": (edited(style="gate"), "does not fit its own record"),
    "a fold": (edited(folded=3), "does not fit its own record"),
    "alpha": (edited(ramp=[0.0, float("nan"), 4, "cosine"]), "alpha must lie in"),
    "a weight more": (lambda s: {f"{SLOT}.seed.more": torch.zeros(3)}, "does not fit its own record"),
    "a weight of another shape": (lambda s: {f"{SLOT}.seed.body.0.weight": torch.zeros(3)}, "does not fit its own"),
    "complex weights": (
        lambda s: {f"{SLOT}.seed.body.0.weight": s[f"{SLOT}.seed.body.0.weight"].to(torch.complex64)},
        "does not fit its own record",
    ),
    "another place": (moved, "slot '2' was attached elsewhere"),
    "no places": (lambda s: {"grown_slots.record": encode_record({"slot": "2"})}, "attached slots is damaged"),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("target", [nothing, kept])
@pytest.mark.parametrize(("damage", "message"), [pytest.param(*case, id=name) for name, case in DAMAGES.items()])
def test_a_state_dict_that_does_not_fit_is_refused_in_one_line_and_changes_nothing(
    damage: Callable[[dict[str, Any]], dict[str, Any]], message: str, target: Callable[[dict[str, SeedSlot]], None]
) -> None:
    state = saved(network_in(blending, 1))
    network = network_in(target, 2)
    before, weights = manifest(network), saved(network)
    with pytest.raises(ValueError, match=message) as refusal:
        network.load_state_dict(state | damage(state))
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500
    assert manifest(network) == before
    assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())


def test_weights_of_a_seed_without_its_record_are_missing_something() -> None:
    state = saved(network_in(kept, 1))
    del state[f"{SLOT}.record"]
    for target in (kept, nothing):
        with pytest.raises(RuntimeError, match=r"grown_slots\.at/2\."):
            network_in(target).load_state_dict(state)


def test_a_seed_in_a_slot_that_the_network_lacks_is_refused() -> None:
    network = small_network()
    attach_slots(network, ["5"], images())
    with pytest.raises(ValueError, match="a seed grew in slot '2', which the network lacks; attach it before"):
        network.load_state_dict(saved(network_in(kept)))


def trained(order: list[str], steps: int, seed: int = 0) -> GrowingNetwork:
    """Return a network with seeds of one width in two slots, germinated in the given order."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    attach_slots(network, ["1", "3"], torch.randn(2, 5))
    growing = GrowingNetwork(
        network,
        SGD(network.parameters(), lr=0.1, momentum=0.9),
        horizon=20,
        lifecycle=EAGER,
        generator=generator_of(seed),
    )
    for slot in order:
        growing.germinate(slot, "lora", stage="BLENDING")
    train(growing, steps)
    return growing


def train(growing: GrowingNetwork, steps: int) -> list[Tensor]:
    """Train, and return all weights."""
    x, y = torch.randn(16, 5, generator=generator_of(1)), torch.randint(3, (16,), generator=generator_of(2))
    for _ in range(steps):
        growing.optimizer.zero_grad()
        F.cross_entropy(growing.module(x), y).backward()
        growing.optimizer.step()
    return [value.clone() for value in growing.module.state_dict().values()]


@pytest.mark.parametrize("present", [[], ["1"], ["1", "3"], ["3", "1"]], ids=str)
def test_an_optimizer_finds_the_momenta_of_each_seed_by_its_name(present: list[str]) -> None:
    growing = trained(["3", "1"], 4)
    state, optimizer_state = saved(growing.module), deepcopy(growing.optimizer.state_dict())
    expected = train(growing, 3)
    other = trained(present, 2, seed=5)
    other.module.load_state_dict(state)
    other.optimizer.load_state_dict(optimizer_state)
    assert all(other.evidence(slot).in_optimizer for slot in ("1", "3"))
    assert all(torch.equal(a, b) for a, b in zip(train(other, 3), expected, strict=True))


def test_an_optimizer_of_other_seeds_is_refused() -> None:
    growing, other = trained(["1"], 1), trained(["3"], 1)
    with pytest.raises(ValueError, match=r"the saved optimizer has the groups \['', 'seed.1'\], this one has"):
        other.optimizer.load_state_dict(growing.optimizer.state_dict())


class Classifier(lightning.LightningModule):
    """Module as a user writes it, with a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_network()
        attach_slots(self.model, ["2", "5"], images())


def test_a_checkpoint_of_lightning_is_loaded_strictly(tmp_path: Path) -> None:
    module = Classifier()
    blending(slots_of(module))
    checkpoint = {"state_dict": module.state_dict(), "pytorch-lightning_version": lightning.__version__}
    torch.save(checkpoint, tmp_path / "best.ckpt")
    loaded = Classifier.load_from_checkpoint(tmp_path / "best.ckpt", weights_only=True)
    assert same(module.model, loaded.model, images())


def test_a_record_is_plain_json() -> None:
    network = network_in(blending)
    slot = slot_named(network, "2")
    assert decode_record(network.state_dict()[f"{SLOT}.record"]) == json.loads(json.dumps(slot.entry()))
    assert slot.entry() == manifest(network)[0]
    assert SeedSlot("place", "vector", 4).record() is None
    assert SeedSlot("place", "vector", 4).ramp == DEFAULT_RAMP
