"""Hosts whose training diverges when a test demands it, and only then."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from esper_lightning.envs import HostPool
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.governor import GovernorConfig

NEVER = 1e9

CALM = GovernorConfig(
    # No finite loss is out of range: only NaN leads to a rollback.
    max_loss=NEVER, max_ratio=NEVER, learned=1.0 / NEVER, guessing=1.0 / NEVER,
    snapshot_every=2, patience=2, cooldown=1, max_rollbacks=2, penalty=0.75,
)  # fmt: skip

UNWATCHED = GovernorConfig(enabled=False)


def break_down(env: HostEnv) -> None:
    """Set a weight to NaN, so that the next loss of the host is NaN."""
    with torch.no_grad():
        next(env.network.parameters()).view(-1)[0] = torch.nan


@contextmanager
def breaking(pool: HostPool, hosts: Sequence[int]) -> Iterator[None]:
    """Break the weights of these hosts at the start of the next host epoch, after the action is chosen."""
    tick = pool.executor.tick

    def broken(*args: Any) -> Any:
        pool.executor.tick = tick
        for host in hosts:
            break_down(pool.envs[host])
        return tick(*args)

    pool.executor.tick = broken
    yield
    assert pool.executor.tick is tick or not hosts, "nobody has trained"
    pool.executor.tick = tick
