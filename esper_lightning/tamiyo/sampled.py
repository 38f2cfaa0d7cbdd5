"""Tamiyo as she explores: with the chances that she gives to every choice, but learning nothing."""

from collections.abc import Callable

import torch
from torch import Tensor

from esper_lightning.envs import Action, HostPool
from esper_lightning.tamiyo.controller import LearnedController
from esper_lightning.tamiyo.policy import Policy


class SampledController(LearnedController):
    """Draws from the policy's distribution.

    Args:
        policy: The network.
        normalise: Raw features -> what the network was trained on.
        seed: Of its own random numbers; every episode continues the stream.
    """

    def __init__(self, policy: Policy, normalise: Callable[[Tensor], Tensor], seed: int) -> None:
        super().__init__(policy, normalise)
        self.generator = torch.Generator(next(policy.parameters()).device).manual_seed(seed)

    @torch.no_grad()
    def act(self, pool: HostPool) -> Action:
        seen = pool.observation._replace(features=self.normalise(pool.observation.features))
        distribution, self.state = self.policy.decide(seen, self.state, pool.masks, pool.episode_starts)
        return distribution.sample(self.generator)
