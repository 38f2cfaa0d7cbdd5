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


def test_the_last_layer_may_stand_within_a_sequential() -> None:
    last = nn.Linear(6, 4)
    nested = Residual(nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), last)))
    x = feature("vector", 4)

    nested.start_as_identity()

    assert torch.equal(nested(x), x)
    assert nested.body[0][0].weight.any() and not last.weight.any()


@pytest.mark.parametrize(
    ("body", "last"),
    [
        ([nn.Linear(4, 4), nn.ReLU()], "ends with ReLU"),
        ([nn.Sequential(nn.Linear(4, 4), nn.ReLU())], "ends with ReLU"),
        ([nn.Sequential()], "is empty"),
        ([], "is empty"),
    ],
)
def test_a_body_that_zeros_at_its_end_would_not_silence_is_refused(body: list[nn.Module], last: str) -> None:
    message = rf"^Residual: the body {last}; end it with a linear layer or a convolution, as in Residual\(nn.Linear"
    with pytest.raises(ValueError, match=message):
        Residual(*body)
