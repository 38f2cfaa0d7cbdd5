"""Strict checks of loaded state, where torch would broadcast or report a wrong shape late."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from esper_lightning.serialization.checks import load_module, load_optimizer


def learned(optimizer: type[Optimizer], **options: Any) -> tuple[nn.Module, Optimizer]:
    """Return a network and an optimizer that has taken a step."""
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    made = optimizer(network.parameters(), lr=0.1, **options)
    network(torch.randn(2, 3, 5, 5)).square().sum().backward()
    made.step()
    return network, made


@pytest.mark.parametrize(
    ("optimizer", "options", "name"), [(Adam, {}, "exp_avg_sq"), (SGD, {"momentum": 0.9}, "momentum_buffer")]
)
def test_momenta_of_another_shape_are_refused(optimizer: type[Optimizer], options: dict[str, Any], name: str) -> None:
    _, made = learned(optimizer, **options)
    saved = deepcopy(made.state_dict())
    load_optimizer(made, deepcopy(saved))
    saved["state"][1][name] = torch.ones(1)  # would be broadcast to the four elements of the bias

    with pytest.raises(ValueError, match=rf"the optimizer's {name} is torch\.float32 \[1\], not torch\.float32 \[4\]"):
        load_optimizer(made, saved)


def test_an_optimizer_that_lacks_what_it_must_know_is_refused() -> None:
    _, made = learned(Adam)
    saved = deepcopy(made.state_dict())
    del saved["state"][0]["exp_avg"]

    with pytest.raises(ValueError, match="the optimizer's state of a parameter lacks exp_avg"):
        load_optimizer(made, saved)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("0.weight", torch.ones(1), r"the network's 0\.weight is torch\.float32 \[1\]"),
        ("1.running_mean", torch.ones(4, dtype=torch.float64), r"the network's 1\.running_mean is torch\.float64"),
        ("1.running_var", None, r"the network's state lacks 1\.running_var"),
        ("2.weight", torch.ones(1), "the network's state has 8 parts, the network 7"),
    ],
)
def test_weights_and_statistics_of_another_network_are_refused(
    name: str, value: torch.Tensor | None, message: str
) -> None:
    network, _ = learned(Adam)
    saved = {**network.state_dict(), name: value}
    if value is None:
        del saved[name]

    with pytest.raises(ValueError, match=message):
        load_module(network, saved)


def test_weights_and_statistics_are_loaded() -> None:
    network, _ = learned(Adam)
    other = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))

    load_module(other, network.state_dict())

    assert other[1].num_batches_tracked == 1
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in other.state_dict().items())
