"""Fixtures for hosts under the Governor."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from esper_lightning.envs import HostPool
from esper_lightning.envs.host_env import HostEnv
from tests.envs.breaking import ONLY_NAN_DIVERGES

MakePool = Callable[..., HostPool]


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> dict[HostEnv, dict[str, Any]]:
    """Record the state of each host at its last snapshot."""
    states: dict[HostEnv, dict[str, Any]] = {}
    keep = HostEnv.take_snapshot

    def watched(env: HostEnv) -> None:
        keep(env)
        states[env] = deepcopy(env.state_dict())

    monkeypatch.setattr(HostEnv, "take_snapshot", watched)
    return states


@pytest.fixture
def rarely_snapshotting_pool(make_pool: MakePool) -> HostPool:
    """Return a pool that takes snapshots at the start and after fossilizations only."""
    return make_pool(2, governor=replace(ONLY_NAN_DIVERGES, snapshot_every=1000), horizon=12)
