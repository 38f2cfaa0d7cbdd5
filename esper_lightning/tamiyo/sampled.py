"""The policy with exploration, as in training, but without learning."""

from collections.abc import Callable

import torch
from torch import Tensor

from esper_lightning.envs import Action, HostPool
from esper_lightning.tamiyo.controller import LearnedController
from esper_lightning.tamiyo.policy import Policy


class SampledController(LearnedController):
    """Samples actions from the policy's distribution.

    Args:
        policy: The network.
        normalise: Function from raw features to the normalised features that the network was trained on.
        rng_seed: RNG seed; every episode continues the stream of random numbers.
    """

    def __init__(self, policy: Policy, normalise: Callable[[Tensor], Tensor], seed: int) -> None:
        super().__init__(policy, normalise)
        self.generator = torch.Generator(next(policy.parameters()).device).manual_seed(seed)

    @torch.no_grad()
    def act(self, pool: HostPool) -> Action:
        seen = pool.observation._replace(features=self.normalise(pool.observation.features))
        distribution, self.state = self.policy.decide(seen, self.state, pool.masks, pool.episode_starts)
        return distribution.sample(self.generator)
