"""Small CNN with blended seeds, and its outputs with some of them."""

from copy import deepcopy

from torch import Tensor, nn

from esper_lightning.growth.alpha import Ramp
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.growth.grown import grow, loss_of, slot_named, small_cnn

PLACES = ["block1", "block2.pool", "block3.pool"]

HALF = Ramp(start=0.0, target=0.5, ticks=1, curve="linear")

BLENDED = [Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED]


def grown_cnn(seeds: int) -> CNN:
    """Return a CNN of three slots, the first `seeds` with blended seeds, in float64 and evaluation mode."""
    network = small_cnn(PLACES)
    loss_of(network)  # moves BatchNorm's statistics
    for place, stage in zip(PLACES[:seeds], BLENDED, strict=False):
        grow(slot_named(network, place), stage, "conv_light", HALF, seed=len(place))
    return network.double().eval()


def plain_pass(network: nn.Module, active: frozenset[str], *inputs: Tensor) -> Tensor:
    """Return the outputs of a copy of the network without the inactive seeds."""
    network = deepcopy(network)
    for name, slot in slots_of(network).items():
        if name not in active:
            slot.empty()
    return network(*inputs)
