"""Between epochs weights and optimizer state are held once, and nothing else of an epoch is."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.envs.executors.fused.epoch import FusedEpoch
from esper_lightning.envs.executors.fused.flat_params import FlatParameters
from esper_lightning.envs.executors.fused.layers import StackedLayer
from esper_lightning.envs.executors.fused.optimizer import StackedOptimizer
from tests.envs.executors.fused.hosts import make, precision


def alive(*kinds: type) -> list[Any]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]


def bytes_of(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def owned(pool: HostPool) -> list[Tensor]:
    """Return weights, buffers and optimizer state of the environments."""
    states = [state for env in pool.envs for state in env.optimizer.state.values()]
    modules = [tensor for env in pool.envs for tensor in env.network.state_dict(keep_vars=True).values()]
    return [*modules, *(value for state in states for value in state.values())]


@pytest.mark.slow
def test_after_thirty_ticks_of_growth_no_weight_lies_where_it_is_not_needed() -> None:
    pool, wanderer = make("fused", "cnn", 4), RandomValid(1)
    most = 0
    unrelated = set(map(id, alive(torch.Tensor)))
    with precision(torch.float64):
        for _ in range(30):
            if pool.envs[0].tick == pool.config.horizon:
                pool.reset(range(4))
            pool.step(wanderer.act(pool))
            most = max(most, sum(tensor.nbytes for tensor in owned(pool)))
    pool.executor.train_epoch(pool.envs, pool.data.train)

    (stack,) = pool.executor.stacks.values()
    layers = [m for m in stack.network.modules() if isinstance(m, StackedLayer)]
    assert len({kind for slot in stack.slots.values() for kind in slot.seeds_by_kind}) > 8, (
        "many kinds of seeds were met"
    )
    assert not any(layer.bound or any(b is not None for b in layer.buffers()) for layer in layers)
    assert alive(FusedEpoch, StackedOptimizer) == []
    assert alive(FlatParameters) == [stack.arena]
    own = owned(pool)
    kept = [env.monitor.snapshot.view()["growing"]["generator"] for env in pool.envs]  # in snapshots
    elsewhere = {
        part.untyped_storage().data_ptr() for part in [*own, *kept, stack.arena.grads, stack.arena.group_of_weight]
    }
    found = [t for t in alive(torch.Tensor) if id(t) not in unrelated]
    rest = [t for t in found if t.untyped_storage().data_ptr() not in elsewhere]
    assert bytes_of(rest) < 0.1 * sum(tensor.nbytes for tensor in own)
    assert bytes_of(own) < 2.0 * most, "room for twice the most seeds so far"
