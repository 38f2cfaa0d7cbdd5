"""Trivial controllers: lower bounds for any other."""

from collections.abc import Mapping
from typing import Any

import torch

from esper_lightning.controllers.learned import Hosts
from esper_lightning.envs import Action, Op
from esper_lightning.envs.device_transfer import copy_to_device
from esper_lightning.envs.spaces.actions import to_action
from esper_lightning.tamiyo.distribution import uniform_distribution


class WaitOnly:
    """Always waits, so the host never grows."""

    def reset(self, pool: Hosts) -> None:
        pass

    def act(self, pool: Hosts) -> Action:
        return to_action([(Op.WAIT,)] * pool.n_envs, pool.device)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, pool: Hosts, state: Mapping[str, Any]) -> None:
        pass


class RandomValid:
    """Draws actions uniformly: a possible op, then a slot possible for it, then a possible choice of every other head.

    Args:
        rng_seed: RNG seed; every episode continues the stream of random numbers.
    """

    def __init__(self, rng_seed: int) -> None:
        self.generator = torch.Generator().manual_seed(rng_seed)

    def reset(self, pool: Hosts) -> None:
        pass

    def act(self, pool: Hosts) -> Action:
        action = uniform_distribution(pool.space.sizes, pool.masks_on_cpu).sample(self.generator)
        return Action(*copy_to_device(torch.stack(action), pool.device))
