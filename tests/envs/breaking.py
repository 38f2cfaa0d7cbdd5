"""Hosts whose training diverges when a test demands it, and only then."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from esper_lightning.envs import HostPool
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.host_env import HostEnv

UNREACHABLE = 1e9

ONLY_NAN_DIVERGES = GovernorConfig(
    # No finite loss is out of range: only NaN leads to a rollback.
    max_loss=UNREACHABLE, max_ratio=UNREACHABLE, learned=1.0 / UNREACHABLE, guessing=1.0 / UNREACHABLE,
    snapshot_every=2, patience=2, cooldown=1, max_rollbacks=2, penalty=0.75,
)  # fmt: skip


def set_weight_to_nan(env: HostEnv) -> None:
    """Set a weight to NaN, so that the next loss of the host is NaN."""
    with torch.no_grad():
        next(env.network.parameters()).view(-1)[0] = torch.nan


@contextmanager
def breaking_epoch(pool: HostPool, hosts: Sequence[int]) -> Iterator[None]:
    """Break the weights of these hosts at the start of the next host epoch, after the action is chosen."""
    tick = pool.executor.train_and_validate

    def broken(*args: Any, **more: Any) -> Any:
        pool.executor.train_and_validate = tick
        for host in hosts:
            set_weight_to_nan(pool.envs[host])
        return tick(*args, **more)

    pool.executor.train_and_validate = broken
    yield
    assert pool.executor.train_and_validate is tick or not hosts, "no host has trained"
    pool.executor.train_and_validate = tick
