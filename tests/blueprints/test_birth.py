"""Initial state of seeds (exact identity or random), and their independence between samples."""

import pytest
import torch
from torch import nn

from esper_lightning.blueprints import build_seed
from tests.blueprints.features import CPU, HERE, LAYOUTS, feature, seeded

BIRTHS = ("identity", "random")

everywhere = pytest.mark.parametrize(("layout", "name"), HERE)

some_widths = pytest.mark.parametrize("width", [1, 3, 8, 33])


@pytest.mark.thinned(5)
@everywhere
@some_widths
def test_a_seed_is_born_as_the_identity_exactly(layout: str, name: str, width: int) -> None:
    x = feature(layout, width)
    seed = build_seed(name, layout, width, device=CPU, generator=seeded())
    assert torch.equal(seed(x), x)


@pytest.mark.thinned(5)
@everywhere
@some_widths
def test_a_seed_born_at_random_does_something_finite_at_once(layout: str, name: str, width: int) -> None:
    x = feature(layout, width)
    y = build_seed(name, layout, width, device=CPU, generator=seeded(), birth="random")(x)
    assert y.shape == x.shape
    assert torch.isfinite(y).all()
    assert not torch.allclose(y, x)


@everywhere
def test_a_seed_born_at_random_passes_gradients_to_every_parameter(layout: str, name: str) -> None:
    seed = build_seed(name, layout, 8, device=CPU, generator=seeded(), birth="random")
    (seed(feature(layout, 8)) ** 3).sum().backward()
    assert all(parameter.grad.any() for parameter in seed.parameters())


@everywhere
def test_births_differ_only_in_what_identity_sets_to_zero(layout: str, name: str) -> None:
    identity, random = (
        build_seed(name, layout, 8, device=CPU, generator=seeded(3), birth=birth).state_dict() for birth in BIRTHS
    )
    changed = [key for key in random if not torch.equal(identity[key], random[key])]
    assert changed
    assert not any(identity[key].any() for key in changed)


@everywhere
def test_only_norm_draws_more_at_random(layout: str, name: str) -> None:
    after = []
    for birth in BIRTHS:
        generator = seeded(3)
        build_seed(name, layout, 8, device=CPU, generator=generator, birth=birth)
        after.append(generator.get_state())
    assert torch.equal(*after) == (name != "norm")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_as_the_identity_draws_nothing(layout: str) -> None:
    generator = seeded(3)
    build_seed("norm", layout, 8, device=CPU, generator=generator)
    assert torch.equal(generator.get_state(), seeded(3).get_state())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_at_random_goes_some_way_towards_the_normalised_feature_or_away(layout: str) -> None:
    scales = [
        build_seed("norm", layout, 8, device=CPU, generator=seeded(i), birth="random").scale.item() for i in range(40)
    ]
    assert -1.0 <= min(scales) < -0.8
    assert 0.8 < max(scales) <= 1.0

    seed, x = build_seed("norm", layout, 8, device=CPU, generator=seeded(), birth="random"), feature(layout, 8)
    reference = nn.functional.group_norm(x, 1) if layout == "image" else nn.functional.layer_norm(x, (8,))
    way = torch.tanh(seed.scale)
    torch.testing.assert_close(seed(x), way * reference + (1 - way) * x)


@everywhere
def test_samples_do_not_see_each_other(layout: str, name: str) -> None:
    x, seed = feature(layout, 8), build_seed(name, layout, 8, device=CPU, generator=seeded(), birth="random")
    alone = torch.cat([seed(sample[None]) for sample in x])
    torch.testing.assert_close(seed(x), alone)
