"""What can be grown: the registry and the blueprints that come with it.

A blueprint of your own is three lines:

    @register("mixer", {"image"}, parameters=lambda c: c * c + c, flops=lambda c, n: 2 * n * c * c)
    def mixer(channels: int) -> nn.Module:
        return Residual(nn.Conv2d(channels, channels, 1))
"""

from esper_lightning.blueprints import conv as conv  # these three register their blueprints
from esper_lightning.blueprints import dense as dense
from esper_lightning.blueprints import transformer as transformer
from esper_lightning.blueprints.initialise import build_on, initialise
from esper_lightning.blueprints.registry import Birth, Blueprint, build_seed, check_known, get, names, nearest, register
from esper_lightning.blueprints.residual import Residual

__all__ = [
    "Birth",
    "Blueprint",
    "Residual",
    "build_on",
    "build_seed",
    "check_known",
    "get",
    "initialise",
    "names",
    "nearest",
    "register",
]
