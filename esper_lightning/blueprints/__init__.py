"""What can be grown: the registry and the blueprints that come with it."""

from esper_lightning.blueprints import conv as conv  # registers the image blueprints
from esper_lightning.blueprints.initialise import build_on, initialise
from esper_lightning.blueprints.registry import Blueprint, build_seed, get, names, register

__all__ = ["Blueprint", "build_on", "build_seed", "get", "initialise", "names", "register"]
