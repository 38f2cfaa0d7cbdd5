"""Blueprints, the kinds of seeds: their registry and the built-in ones.

A custom blueprint takes three lines:

    @register("mixer", {"image"}, parameters=lambda c: c * c + c, flops=lambda c, n: 2 * n * c * c)
    def mixer(channels: int) -> nn.Module:
        return Residual(nn.Conv2d(channels, channels, 1))
"""

from esper_lightning.growth.blueprints.registry import (
    STACK,
    Birth,
    Blueprint,
    blueprint_names,
    build_on,
    build_seed,
    check_blueprint_name,
    default_blueprints,
    find_blueprint,
    get_blueprint,
    initialise,
    register,
)
from esper_lightning.growth.blueprints.seeds import Residual  # importing this module registers its blueprints
from esper_lightning.runtime.registry import suggest_name

__all__ = [
    "STACK",
    "Birth",
    "Blueprint",
    "Residual",
    "blueprint_names",
    "build_on",
    "build_seed",
    "check_blueprint_name",
    "default_blueprints",
    "find_blueprint",
    "get_blueprint",
    "initialise",
    "register",
    "suggest_name",
]
