"""Blueprints are known by name, and every mistake is told with the way out."""

import pytest
import torch
from torch import nn

from esper_lightning.blueprints import build_seed, get, names, register, registry

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))


def one_by_one(channels: int) -> nn.Module:
    """A mixing of channels."""
    return nn.Conv2d(channels, channels, 1)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_registered_blueprint_is_offered_and_built() -> None:
    assert register("mine", {"image"}, parameters=lambda c: c * c + c)(one_by_one) is one_by_one
    assert names("image")[-1] == "mine"
    assert "mine" not in names("sequence")
    assert get("mine").name == "mine"
    assert get("mine").layouts == {"image"}
    assert get("mine").parameters(5) == 30
    seed = build_seed("mine", "image", 5, CPU, seeded())
    assert isinstance(seed, nn.Conv2d)
    assert seed.weight.shape == (5, 5, 1, 1)


def test_a_blueprint_may_grow_on_several_layouts() -> None:
    register("both", {"sequence", "vector"}, parameters=lambda c: c * c + c)(lambda c: nn.Linear(c, c))
    assert "both" in names("sequence")
    assert "both" in names("vector")
    assert "both" not in names("image")


def test_a_name_can_be_taken_only_once() -> None:
    before = get("norm")
    with pytest.raises(ValueError, match=r"^blueprint 'norm' is already registered; choose another name$"):
        register("norm", {"vector"}, parameters=lambda c: 0)(one_by_one)
    assert get("norm") is before


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"^unknown blueprint 'botleneck'; did you mean 'bottleneck'\?$"):
        get("botleneck")


def test_a_name_like_no_other_gets_the_whole_list() -> None:
    with pytest.raises(ValueError, match=r"^unknown blueprint 'xyzzy'; known: norm, attention, .*conv_heavy"):
        build_seed("xyzzy", "image", 4, CPU, seeded())


def test_a_blueprint_for_another_layout_is_refused_with_those_that_fit() -> None:
    register("mix", {"mesh"}, parameters=lambda c: c)(one_by_one)
    register("stretch", {"mesh"}, parameters=lambda c: c)(one_by_one)
    message = r"^blueprint 'conv_small' does not grow on mesh features; these do: mix, stretch$"
    with pytest.raises(ValueError, match=message):
        build_seed("conv_small", "mesh", 4, CPU, seeded())


def test_the_seven_image_blueprints_are_offered_in_the_order_of_the_manual() -> None:
    offered = ["norm", "attention", "conv_small", "depthwise", "bottleneck", "conv_light", "conv_heavy"]
    assert names("image") == offered
    assert names("nonsense") == []
