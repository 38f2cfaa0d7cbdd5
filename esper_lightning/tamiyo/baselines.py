"""Controllers that any other must beat."""

import torch

from esper_lightning.envs import Action, HostPool, Op
from esper_lightning.envs.actions import to_action
from esper_lightning.envs.transfer import send
from esper_lightning.tamiyo.heads import FactoredDistribution, uniform


class WaitOnly:
    """Never grows anything: the host as it is."""

    def reset(self, pool: HostPool) -> None:
        pass

    def act(self, pool: HostPool) -> Action:
        return to_action([(Op.WAIT,)] * pool.n_envs, pool.device)


class RandomValid:
    """Draws uniformly: an op among the possible ones, then a slot possible for it, then every other head in turn.

    Args:
        seed: Of its own random numbers; every episode continues the stream.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self, pool: HostPool) -> None:
        pass

    def act(self, pool: HostPool) -> Action:
        logits = uniform(pool.space.sizes, pool.n_envs)
        action = FactoredDistribution(logits, pool.masks_on_cpu).sample(self.generator)
        return Action(*send(torch.stack(action), pool.device))
