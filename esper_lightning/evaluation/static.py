"""Static controls: what a controller's hosts came to in the end, built in from the first tick. H hosts."""

from collections.abc import Sequence

from esper_lightning.envs import Action, HostPool
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.evaluation.compare import Outcome, Topology
from esper_lightning.growth.alpha import FULL
from esper_lightning.growth.stages import Stage
from esper_lightning.tamiyo.baselines import WaitOnly

TO_THE_END = (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED)


class Static:
    """Hosts that have their topology from the first tick on and never change.

    Weights of the seeds come from the host's own generator, right after the host's, and begin as `lifecycle.birth`
    says; alpha is 1 and every seed a fossil, so all of it learns from the first minibatch, on the same data as ever.

    Args:
        topologies: What each host has.
    """

    def __init__(self, topologies: Sequence[Topology]) -> None:
        self.topologies = topologies
        self.waits = WaitOnly()

    def reset(self, pool: HostPool) -> None:
        for env, topology in zip(pool.envs, self.topologies, strict=True):
            build_in(env, topology)
        self.waits.reset(pool)

    def act(self, pool: HostPool) -> Action:
        return self.waits.act(pool)


def build_in(env: HostEnv, topology: Topology) -> None:
    """Puts fossils with fresh weights into the empty slots of a host that has not trained yet."""
    for slot, blueprint, style in topology:
        env.growing.germinate(slot, blueprint, style=style)
        place = env.growing.slots[slot]
        place.aim(FULL)
        for stage in TO_THE_END:
            place.move_to(stage)
    if env.guard is not None:
        env.keep()  # a rollback goes back to this, not to the bare host


def affordable_ticks(static: Outcome, spent: Sequence[int]) -> list[int]:
    """Host epochs of each static host [H] that cost no more than its grown twin has `spent` on training [H].

    Whole host epochs, the finest that a pool can train by itself: so a static host may have up to one host epoch less
    than it could afford. More than the horizon where the grown host has spent more than the static one costs.
    """
    # A host that could not be trained at all has no price; it costs nothing either.
    return [
        int(budget) * int(ticks) // int(flops) if flops else 0
        for budget, ticks, flops in zip(spent, static.ticks, static.flops, strict=True)
    ]
