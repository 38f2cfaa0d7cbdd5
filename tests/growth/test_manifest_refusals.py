"""A manifest that does not fit or is damaged is refused by name and changes nothing."""

from typing import Any

import pytest
from torch import nn

from esper_lightning.growth.manifest import manifest, rebuild
from esper_lightning.growth.slot import Layout, SeedSlot
from tests.growth.grown import (
    host_of,
    small_cnn,
)
from tests.growth.rebuilt import check_refused_and_unchanged, grown_pair


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
    {"blueprint": None},  # a seed in TRAINING needs a blueprint
    {"blueprint": "conv_lite"},
    {"blueprint": "mlp"},  # registered, but not for images
    {"stage": "DORMANT"},  # with a blueprint
    {"layout": "vector"},
    {"layout": None},
    {"width": 4},
    {"width": 8.0},
    {"width": "8"},
]


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
