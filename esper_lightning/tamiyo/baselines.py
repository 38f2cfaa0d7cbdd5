"""Trivial controllers: lower bounds for any other."""

import torch

from esper_lightning.envs import Action, HostPool, Op
from esper_lightning.envs.actions import to_action
from esper_lightning.envs.transfer import send
from esper_lightning.tamiyo.heads import FactoredDistribution, uniform


class WaitOnly:
    """Always waits, so the host never grows."""

    def reset(self, pool: HostPool) -> None:
        pass

    def act(self, pool: HostPool) -> Action:
        return to_action([(Op.WAIT,)] * pool.n_envs, pool.device)


class RandomValid:
    """Draws actions uniformly: a possible op, then a slot possible for it, then a possible choice of every other head.

    Args:
        rng_seed: RNG seed; every episode continues the stream of random numbers.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self, pool: HostPool) -> None:
        pass

    def act(self, pool: HostPool) -> Action:
        logits = uniform(pool.space.sizes, pool.n_envs)
        action = FactoredDistribution(logits, pool.masks_on_cpu).sample(self.generator)
        return Action(*send(torch.stack(action), pool.device))
