"""Registry of blueprints by layout and name; every error message says how to fix the mistake."""

from typing import Any

import pytest
import torch
from torch import nn

from esper_lightning.growth.blueprints import (
    Residual,
    blueprint_names,
    check_blueprint_name,
    get_blueprint,
    register,
    registry,
)
from tests.blueprints.features import feature, seed_of

COUNTS: dict[str, Any] = {"parameters": lambda c: c * c + c, "flops": lambda c, n: 2 * n * c * c}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the registry after each test."""
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))


def one_by_one(channels: int) -> nn.Module:
    """Build a residual 1×1 convolution."""
    return Residual(nn.Conv2d(channels, channels, 1))


def test_a_registered_blueprint_is_offered_and_built() -> None:
    assert register("mine", {"image"}, **COUNTS)(one_by_one) is one_by_one
    assert blueprint_names("image")[-1] == "mine" and "mine" not in blueprint_names("sequence")
    mine = get_blueprint("mine", "image")
    assert (mine.name, mine.layouts, mine.parameters(5), mine.flops(5, 12)) == ("mine", {"image"}, 30, 600)
    seed = seed_of("mine", "image", 5, birth="identity")
    assert seed.body[0].weight.shape == (5, 5, 1, 1)
    assert torch.equal(seed(feature("image", 5)), feature("image", 5))


def test_one_name_may_stand_for_another_module_on_each_layout() -> None:
    register("conv_small", {"sequence", "vector"}, **COUNTS)(lambda c: Residual(nn.Linear(c, c)))
    assert get_blueprint("conv_small", "sequence") is get_blueprint("conv_small", "vector")
    assert isinstance(seed_of("conv_small", "image").body[0], nn.Conv2d)
    assert isinstance(seed_of("conv_small", "vector").body[0], nn.Linear)


def test_a_name_can_be_taken_only_once_on_a_layout() -> None:
    before = list(registry._BLUEPRINTS)
    with pytest.raises(ValueError, match=r"^blueprint 'lora' is already registered for vector features; choose anothe"):
        register("lora", {"image", "vector"}, **COUNTS)(one_by_one)
    assert list(registry._BLUEPRINTS) == before


def test_a_blueprint_that_cannot_begin_as_the_identity_says_so() -> None:
    register("bare", {"image"}, **COUNTS)(lambda c: nn.Conv2d(c, c, 1))
    with pytest.raises(ValueError, match=r"^blueprint 'bare' cannot begin as the identity: .* start_as_identity\(\)"):
        seed_of("bare", "image", birth="identity")
    assert seed_of("bare", "image", birth="random").weight.any()


def test_unknown_names_and_other_layouts_are_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    register("mix", {"mesh"}, **COUNTS)(one_by_one)
    for call, said in (
        (lambda: check_blueprint_name("botleneck"), r"^unknown blueprint 'botleneck'; did you mean 'bottleneck'\?$"),
        (lambda: get_blueprint("botleneck", "vector"), r"^unknown blueprint 'botleneck'; did you mean 'bottleneck'\?$"),
        (lambda: seed_of("xyzzy", "image"), r"^unknown blueprint 'xyzzy'; there are: norm, attention, .*, lora, "),
        (lambda: seed_of("gated", "mesh"), r"^blueprint 'gated' does not grow on mesh features; these do: mix$"),
        (lambda: get_blueprint("mix", "none"), r"^blueprint 'mix' does not grow on none features; these do: none$"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
