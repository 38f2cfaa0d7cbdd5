"""Observations and actions have the layout that their names give."""

from collections.abc import Callable

import torch

from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import HEADS, HostPool
from esper_lightning.envs.spaces.observation import compute_features
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.tamiyo.policy import Policy
from tests.conftest import FREE


def test_observations_and_actions_are_laid_out_as_their_names_say(
    make_loop: Callable[..., RolloutCollector], make_pool: Callable[..., HostPool], make_policy: Callable[..., Policy]
) -> None:
    """A9: every column of an observation holds the feature of its name, and every head has the named choices."""
    loop = make_loop(2)
    pool, names, wanderer = loop.pool, loop.pool.feature_names, RandomValid(1)
    assert len(set(names)) == len(names)
    assert loop.buffer.observation.features.shape[-1] == loop.raw_features.shape[-1] == len(names)
    for _ in range(pool.config.horizon):
        pool.step(wanderer.act(pool))
        for env, row in zip(pool.envs, pool.observation.features, strict=True):
            expected = compute_features(env)
            assert list(expected) == names
            torch.testing.assert_close(row, torch.tensor([expected[name] for name in names]), rtol=0, atol=0)

    free = make_pool(1, **FREE)
    for of, policy in ((pool, loop.policy), (free, make_policy(free))):
        choices = {head: table.output.out_features for head, table in policy.heads.tables.items()}
        offered = dict(zip(HEADS, of.space, strict=True))
        assert choices == {head: len(offered[head]) for head in choices}
        assert all(len(offered[head]) == 1 for head in set(HEADS) - set(choices))
        for head, axis in {"op": of.masks.op, "blueprint": of.masks.blueprint, "target": of.masks.target}.items():
            assert axis.shape[-1] == len(offered[head])
