"""Episodes of random actions, by which executors are compared."""

from collections.abc import Iterable

import torch
from torch import Tensor

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.growth.stages import Stage


def episode(pool: HostPool, stages: set[Stage] | None = None) -> list[Tensor]:
    """Play an episode and return all its results and the final weights; add the reached stages to `stages`."""
    random_policy = RandomValid(3)
    results = [pool.reset(range(pool.n_envs)).features.clone()]
    for _ in range(pool.config.horizon):
        step = pool.step(random_policy.act(pool))
        results += [part.clone() for part in (*step.observation, step.reward, *step.metrics)]
        if stages is not None:
            stages |= {event.after for event in step.events}
    return results + [weights for env in pool.envs for weights in env.network.state_dict().values()]


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
