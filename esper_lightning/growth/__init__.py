"""Networks that grow seeds in slots, usable alone with any training loop. See docs/methods/seeds.md."""

from esper_lightning.growth.attach import attach_from_state_dict, attach_slots, detach_slots
from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.counterfactual import (
    contributions,
    forward_variants,
    measure_variants,
    shapley_values,
)
from esper_lightning.growth.export import fold, load, save
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.lifecycle import SeedEvent, slots_of
from esper_lightning.growth.param_groups import follow
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stack import stack
from esper_lightning.growth.stages import Stage

__all__ = [
    "GrowingNetwork",
    "LifecycleConfig",
    "Ramp",
    "SeedEvent",
    "SeedSlot",
    "Stage",
    "attach_from_state_dict",
    "attach_slots",
    "contributions",
    "detach_slots",
    "fold",
    "follow",
    "forward_variants",
    "load",
    "measure_variants",
    "save",
    "shapley_values",
    "slots_of",
    "stack",
]
