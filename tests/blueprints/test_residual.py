"""Residual blocks x + body(x), the base of user-defined seeds."""

import pytest
import torch
from torch import nn

from esper_lightning.blueprints import Residual
from tests.blueprints.features import feature


def test_the_body_is_added() -> None:
    layer, x = nn.Linear(4, 4), feature("vector", 4)
    assert torch.equal(Residual(layer)(x), x + layer(x))


def test_as_the_identity_only_the_last_layer_is_zero() -> None:
    seed = Residual(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    seed.start_as_identity()
    assert all(parameter.any() for parameter in seed.body[0].parameters())
    assert not any(parameter.any() for parameter in seed.body[2].parameters())


@pytest.mark.parametrize(
    ("body", "last"),
    [
        ([nn.Linear(4, 4), nn.ReLU()], "ReLU"),
        ([nn.Sequential(nn.Linear(4, 4), nn.ReLU())], "Sequential"),
        ([], "nothing"),
    ],
)
def test_a_body_that_zeros_at_its_end_would_not_silence_is_refused(body: list[nn.Module], last: str) -> None:
    message = f"^Residual: the body ends with {last}; end it with a linear layer or a convolution$"
    with pytest.raises(ValueError, match=message):
        Residual(*body)
