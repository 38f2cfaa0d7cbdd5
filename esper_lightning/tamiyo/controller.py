"""Whoever decides: the learned policy and the rules it is compared with run in the same pool."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from esper_lightning.envs import Action, HostPool
from esper_lightning.tamiyo.policy import Policy


class Controller(Protocol):
    """Decides for every host of a pool, tick by tick."""

    def reset(self, pool: HostPool) -> None:
        """An episode begins in every environment."""

    def act(self, pool: HostPool) -> Action:
        """One action per environment, possible by `pool.masks`."""


class LearnedController:
    """Tamiyo without exploration: the likeliest op, then the likeliest choice for it.

    Args:
        policy: The network.
        normalise: Raw features -> what the network was trained on.
    """

    def __init__(self, policy: Policy, normalise: Callable[[Tensor], Tensor]) -> None:
        self.policy = policy
        self.normalise = normalise

    def reset(self, pool: HostPool) -> None:
        self.state = self.policy.initial_state(pool.n_envs)

    @torch.no_grad()
    def act(self, pool: HostPool) -> Action:
        seen = pool.observation._replace(features=self.normalise(pool.observation.features))
        # As in training: a rollback begins a new trajectory.
        distribution, self.state = self.policy.decide(seen, self.state, pool.masks, pool.episode_starts)
        return distribution.mode()
