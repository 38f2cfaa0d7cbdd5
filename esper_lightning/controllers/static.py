"""Static controls: the network that growth ended with, complete before the first tick."""

from collections.abc import Sequence
from typing import NamedTuple

from esper_lightning.controllers.learned import Hosts
from esper_lightning.controllers.rules import WaitOnly
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.blueprints import initialise
from esper_lightning.growth.depth import DepthSlot
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.stages import STAGES_TO_FOSSILIZED


class FossilizedSeed(NamedTuple):
    """One fossilized seed, described without its weights."""

    slot: str
    blueprint: str


Topology = tuple[FossilizedSeed, ...]
"""All fossilized seeds of one host, in the order of its slots."""


class StaticController(WaitOnly):
    """Gives every host its final network, the topology with its index, before the first tick and then only waits.

    The weights of seeds and of further blocks are drawn from the host's own generator. Every seed is fossilized, so all
    of the network learns from the first minibatch, on the same data as in any other episode.
    """

    def __init__(self, topologies: Sequence[Topology]) -> None:
        self.topologies = topologies

    def reset(self, pool: Hosts) -> None:
        for env, topology in zip(pool.envs, self.topologies, strict=True):
            for name, blueprint in topology:
                env.growing.germinate(name, blueprint)
                slot = env.growing.slots[name]
                if isinstance(slot, DepthSlot):
                    draw(slot, env.growing)
                    continue
                slot.start_ramp(Ramp())
                for stage in STAGES_TO_FOSSILIZED:
                    slot.move_to(stage)
            if isinstance(env, HostEnv) and env.monitor is not None:
                env.take_snapshot()  # a rollback restores this network, not the bare host


def draw(slot: DepthSlot, growing: GrowingNetwork) -> None:
    """Give the blocks of a depth slot weights of their own, as the host gives them to its blocks."""
    for block in slot.grown:
        initialise(block, growing.generator)
    if (of_host := getattr(growing.module, "initialise", None)) is not None:
        of_host(growing.generator)
