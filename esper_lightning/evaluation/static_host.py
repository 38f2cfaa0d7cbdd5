"""Static controls: the final networks of a controller's hosts, complete from the first tick. H hosts."""

from collections.abc import Sequence

import numpy as np

from esper_lightning.controllers.random import WaitOnly
from esper_lightning.envs import Action, HostPool
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.evaluation.play import Outcome, Topology
from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.stages import Stage

STAGES_TO_FOSSILIZED = (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED)


class StaticController:
    """Gives every host its final topology at the first tick and then only waits.

    The weights of the seeds come from the host's own generator, right after the host's weights, and are initialised
    according to `lifecycle.birth`. Alpha is 1 and every seed is fossilized, so all of the network learns from the first
    minibatch, on the same data as in any other episode.

    Args:
        topologies: Fossilized seeds of each host.
    """

    def __init__(self, topologies: Sequence[Topology]) -> None:
        self.topologies = topologies
        self.wait_controller = WaitOnly()

    def reset(self, pool: HostPool) -> None:
        for env, topology in zip(pool.envs, self.topologies, strict=True):
            build_topology(env, topology)
        self.wait_controller.reset(pool)

    def act(self, pool: HostPool) -> Action:
        return self.wait_controller.act(pool)


def build_topology(env: HostEnv, topology: Topology) -> None:
    """Put fossilized seeds with fresh weights into the empty slots of a host that has not trained yet."""
    for slot, blueprint, style in topology:
        env.growing.germinate(slot, blueprint, style=style)
        seed_slot = env.growing.slots[slot]
        seed_slot.start_ramp(Ramp())
        for stage in STAGES_TO_FOSSILIZED:
            seed_slot.move_to(stage)
    if env.monitor is not None:
        env.take_snapshot()  # a rollback restores this network, not the bare host


def affordable_ticks(static: Outcome, spent_flops: Sequence[int] | np.ndarray) -> list[int]:
    """Return the host epochs of each static host [H] that its grown twin's FLOPs pay for.

    `spent_flops` [H] are the FLOPs that the grown hosts have spent on training. A pool trains whole host epochs only,
    so a static host may get up to one host epoch less than it could afford. The result exceeds the horizon if the grown
    host has spent more than the static one costs.
    """
    # A host that could not be trained has an unknown cost; its budget buys no host epochs.
    return [
        int(budget) * int(ticks) // int(flops) if flops else 0
        for budget, ticks, flops in zip(spent_flops, static.ticks, static.flops, strict=True)
    ]
