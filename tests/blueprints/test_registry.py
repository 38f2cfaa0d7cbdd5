"""Registry of blueprints by layout and name; every error message says how to fix the mistake."""

import pytest
import torch
from torch import nn

from esper_lightning.blueprints import (
    Residual,
    blueprint_names,
    build_seed,
    check_blueprint_name,
    get_blueprint,
    register,
    registry,
)
from tests.blueprints.features import CPU, feature, seeded


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the registry after each test."""
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))


def one_by_one(channels: int) -> nn.Module:
    """Build a residual 1×1 convolution."""
    return Residual(nn.Conv2d(channels, channels, 1))


def parameters(c: int) -> int:
    return c * c + c


def flops(c: int, n: int) -> int:
    return 2 * n * c * c


def test_a_registered_blueprint_is_offered_and_built() -> None:
    assert register("mine", {"image"}, parameters=parameters, flops=flops)(one_by_one) is one_by_one
    assert blueprint_names("image")[-1] == "mine"
    assert "mine" not in blueprint_names("sequence")
    mine = get_blueprint("mine", "image")
    assert (mine.name, mine.layouts, mine.devices) == ("mine", {"image"}, None)
    assert (mine.parameters(5), mine.flops(5, 12)) == (30, 600)
    seed = build_seed("mine", "image", 5, device=CPU, generator=seeded())
    assert seed.body[0].weight.shape == (5, 5, 1, 1)
    assert torch.equal(seed(feature("image", 5)), feature("image", 5))


def test_a_blueprint_may_grow_on_several_layouts() -> None:
    register("both", {"sequence", "vector"}, parameters=parameters, flops=flops)(lambda c: Residual(nn.Linear(c, c)))
    assert get_blueprint("both", "sequence") is get_blueprint("both", "vector")
    assert "both" not in blueprint_names("image")


def test_one_name_may_stand_for_another_module_on_each_layout() -> None:
    register("conv_small", {"vector"}, parameters=parameters, flops=flops)(lambda c: Residual(nn.Linear(c, c)))
    on_image, on_vector = (
        build_seed("conv_small", layout, 4, device=CPU, generator=seeded()) for layout in ("image", "vector")
    )
    assert isinstance(on_image.body[0], nn.Conv2d)
    assert isinstance(on_vector.body[0], nn.Linear)


def test_a_name_can_be_taken_only_once_on_a_layout() -> None:
    before = list(registry._BLUEPRINTS)
    message = r"^blueprint 'lora' is already registered for vector features; choose another name$"
    with pytest.raises(ValueError, match=message):
        register("lora", {"image", "vector"}, parameters=parameters, flops=flops)(one_by_one)
    assert list(registry._BLUEPRINTS) == before


def test_a_blueprint_is_offered_only_on_its_devices() -> None:
    register("picky", {"image"}, parameters=parameters, flops=flops, devices={"cuda", "mps"})(one_by_one)
    assert "picky" in blueprint_names("image")
    assert "picky" not in blueprint_names("image", CPU)
    assert "picky" in blueprint_names("image", torch.device("mps"))
    assert set(blueprint_names("image")) - set(blueprint_names("image", CPU)) == {"picky"}
    with pytest.raises(ValueError, match=r"^blueprint 'picky' does not run on cpu; it runs on: cuda, mps$"):
        build_seed("picky", "image", 4, device=CPU, generator=seeded())


def test_a_blueprint_that_cannot_begin_as_the_identity_says_so() -> None:
    register("bare", {"image"}, parameters=parameters, flops=flops)(lambda c: nn.Conv2d(c, c, 1))
    message = (
        r"^blueprint 'bare' cannot begin as the identity: build it with Residual, give its Conv2d a method "
        r"start_as_identity\(\), or use birth random$"
    )
    with pytest.raises(ValueError, match=message):
        build_seed("bare", "image", 4, device=CPU, generator=seeded())
    assert build_seed("bare", "image", 4, device=CPU, generator=seeded(), birth="random").weight.any()


def test_an_unknown_name_gets_the_nearest_one() -> None:
    for ask in (
        check_blueprint_name,
        lambda name: get_blueprint(name, "image"),
        lambda name: get_blueprint(name, "vector"),
    ):
        with pytest.raises(ValueError, match=r"^unknown blueprint 'botleneck'; did you mean 'bottleneck'\?$"):
            ask("botleneck")


def test_a_name_like_no_other_gets_the_whole_list(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^unknown blueprint 'xyzzy'; there are: norm, attention, .*, lora, "):
        build_seed("xyzzy", "image", 4, device=CPU, generator=seeded())
    monkeypatch.setattr(registry, "_BLUEPRINTS", {})
    register("norm", {"image", "vector"}, parameters=parameters, flops=flops)(one_by_one)
    register("mix", {"sequence"}, parameters=parameters, flops=flops)(one_by_one)
    with pytest.raises(ValueError, match=r"^unknown blueprint 'xyzzy'; there are: norm, mix$"):
        check_blueprint_name("xyzzy")


def test_a_name_known_on_some_layout_is_known() -> None:
    for name in ("conv_heavy", "gated", "flex_attention"):
        check_blueprint_name(name)


def test_a_blueprint_for_another_layout_is_refused_with_those_that_fit() -> None:
    for name in ("mix", "stretch"):
        register(name, {"mesh"}, parameters=parameters, flops=flops)(one_by_one)
    message = r"^blueprint 'conv_small' does not grow on mesh features; these do: mix, stretch$"
    with pytest.raises(ValueError, match=message):
        build_seed("conv_small", "mesh", 4, device=CPU, generator=seeded())
    with pytest.raises(ValueError, match=r"^blueprint 'mix' does not grow on nonsense features; these do: none$"):
        get_blueprint("mix", "nonsense")


def test_the_seven_image_blueprints_are_offered_in_the_order_of_the_manual() -> None:
    offered = ["norm", "attention", "conv_small", "depthwise", "bottleneck", "conv_light", "conv_heavy"]
    assert blueprint_names("image") == offered
    assert blueprint_names("nonsense") == []
