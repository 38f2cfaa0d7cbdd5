"""Small networks for tests of attached slots."""

import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import attach_slots, attached_places
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from tests.growth.grown import generator_of, grow

WIDTH = 6


def small_network() -> nn.Sequential:
    """Return a network with image features after `0` to `3` and vectors after `4` to `6`; 2 classes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, 2),
        )


def images(samples: int = 4) -> Tensor:
    return torch.randn(samples, 3, 8, 8, generator=generator_of(3))


def grown_network() -> nn.Sequential:
    """Return the small network with fossilized seeds after the activation and the hidden layer, in evaluation mode."""
    network = small_network()
    slots = attach_slots(network, ["2", "5"], images())
    grow(slots["2"], Stage.FOSSILIZED, "conv_light")
    grow(slots["5"], Stage.FOSSILIZED, "mlp_small")
    return network.eval()


class Residual(nn.Module):
    """Residual block x + body(x) between two layers, with a layer whose output is unused and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.aside = nn.Linear(WIDTH, 4)
        self.never = nn.Linear(WIDTH, 4)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, 5] -> [B, 3]
        x = self.stem(x)
        self.aside(x)
        return self.head(x + self.body(x))


def assert_untouched(network: nn.Module) -> None:
    assert slots_of(network) == {}
    assert attached_places(network) == []
    assert not any(module._forward_hooks for module in network.modules())
