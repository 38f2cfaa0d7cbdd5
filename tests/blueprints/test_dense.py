"""Blueprints that act on each position separately."""

import math

import pytest
import torch
from torch.nn import functional as F

from esper_lightning.blueprints import blueprint_names, build_seed
from tests.blueprints.features import CPU, feature, seeded

SHARED = ["norm", "lora", "mlp_small", "mlp"]


def test_what_grows_on_sequences_and_vectors() -> None:
    assert blueprint_names("sequence") == [
        "norm",
        "lora",
        "lora_large",
        "mlp_small",
        "mlp",
        "attention",
        "flex_attention",
    ]
    assert blueprint_names("vector") == ["norm", "lora", "mlp_small", "mlp", "gated"]


@pytest.mark.parametrize("name", SHARED)
def test_a_sequence_is_treated_as_so_many_vectors(name: str) -> None:
    x = feature("sequence", 8)  # [B, T, C]
    on_sequence, on_vector = (
        build_seed(name, layout, 8, device=CPU, generator=seeded(), birth="random") for layout in ("sequence", "vector")
    )
    torch.testing.assert_close(on_sequence(x).flatten(0, 1), on_vector(x.flatten(0, 1)))


@pytest.mark.parametrize(("name", "rank"), [("lora", 8), ("lora_large", 32)])
def test_a_lora_changes_features_within_few_directions(name: str, rank: int) -> None:
    seed, x = (
        build_seed(name, "sequence", 48, device=CPU, generator=seeded(), birth="random").double(),
        feature("sequence", 48).double(),
    )
    assert torch.linalg.matrix_rank((seed(x) - x).flatten(0, 1)) == rank


def test_a_lora_wider_than_its_feature_grows_too() -> None:
    seed, x = (
        build_seed("lora_large", "sequence", 3, device=CPU, generator=seeded(), birth="random"),
        feature("sequence", 3),
    )
    assert seed(x).shape == x.shape


@pytest.mark.parametrize(("name", "factor"), [("mlp_small", 2), ("mlp", 4)])
def test_an_mlp_by_hand(name: str, factor: int) -> None:
    seed, x = (
        build_seed(name, "vector", 5, device=CPU, generator=seeded(), birth="random").double(),
        feature("vector", 5).double(),
    )
    w1, b1, w2, b2 = seed.parameters()
    assert w1.shape == (5 * factor, 5)
    inner = x @ w1.T + b1
    gelu = inner * 0.5 * (1.0 + torch.erf(inner / math.sqrt(2.0)))
    torch.testing.assert_close(seed(x), x + gelu @ w2.T + b2)


def test_in_a_gated_seed_the_second_half_gates_the_first() -> None:
    seed, x = (
        build_seed("gated", "vector", 5, device=CPU, generator=seeded(), birth="random").double(),
        feature("vector", 5).double(),
    )
    w1, b1, w2, b2 = seed.parameters()
    value, gate = x @ w1[:5].T + b1[:5], x @ w1[5:].T + b1[5:]
    torch.testing.assert_close(seed(x), x + F.linear(value / (1.0 + torch.exp(-gate)), w2, b2))
