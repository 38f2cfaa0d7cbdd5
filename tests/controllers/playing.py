"""Helper that plays an episode with a controller."""

import torch
from torch import Tensor

from esper_lightning.controllers.learned import Controller
from esper_lightning.envs import HostPool


def episode(pool: HostPool, controller: Controller) -> Tensor:
    """Play an episode on three hosts and return its actions [T, heads, N]; the pool raises if one is masked."""
    pool.reset([1, 2, 3])
    controller.reset(pool)
    taken = []
    for _ in range(pool.config.horizon):
        action = controller.act(pool)
        taken.append(torch.stack(action))
        pool.step(action)
    return torch.stack(taken)
