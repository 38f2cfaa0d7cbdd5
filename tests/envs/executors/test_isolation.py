"""Hosts of a pool train bit for bit as without seeds while these learn, with every executor and isolation."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.envs import HostPool
from esper_lightning.envs.executors.parallel import StreamsExecutor
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.blend import Isolation
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.decisions import WAIT, act, germinate
from tests.envs.executors.episodes import same
from tests.envs.executors.fake_cuda import FakeCuda
from tests.tiers import rest_is_slow

MakePool = Callable[..., HostPool]


TICKS = 3


def host_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the host's weights and statistics, without those of its seeds."""
    both = (*network.named_parameters(), *network.named_buffers())
    return {name: value.detach().clone() for name, value in both if ".seed." not in name and "alpha" not in name}


def train_hosts(pool: HostPool, seeded: bool) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Train two hosts on data in fixed order; if `seeded`, with another seed in every slot of the second.

    Returns the hosts' weights, and score and loss of each tick.
    """
    for i, env in enumerate(pool.envs):
        env.data_order = lambda rng_seed, tick, i=i: 100 * i + tick
    actions = [act(WAIT, germinate(k, blueprint=k) if seeded else WAIT) for k in range(TICKS)]
    metrics = []
    for action in actions:
        step = pool.step(action).metrics
        metrics += [step.score, step.loss]
    return [host_weights(env.network) for env in pool.envs], metrics


CASES = [
    (executor, isolation, changes)
    for executor in ("loop", "fused", "threads", "streams")
    for isolation in get_args(Isolation)
    for changes in ({}, {"micro_batches": 4}, {"precision": "bf16"}, {"optimizer": "sgd", "max_grad_norm": None})
]


@pytest.mark.parametrize(
    ("executor", "isolation", "changes"),
    rest_is_slow(
        CASES,
        [
            ("loop", "proximal", {}),
            ("loop", "straight_through", {}),
            ("fused", "proximal", {}),
            ("threads", "proximal", {"micro_batches": 4}),
            ("streams", "proximal", {"precision": "bf16"}),
        ],
    ),
    ids=str,
)
def test_a_host_trains_as_without_seeds_while_they_learn(
    make_pool: MakePool, fake_cuda: FakeCuda, executor: str, isolation: Isolation, changes: dict[str, object]
) -> None:
    def make() -> HostPool:
        pool = make_pool(
            2,
            host=partial(CNN, base=4, pools=2, slots=["block1", "block2.pool", "block3"]),
            executor="loop" if executor == "streams" else executor,
            training=replace(HostTraining(batch_size=16, batches=3), **changes),
            lifecycle=LifecycleConfig(isolation=isolation, training_ticks=TICKS),
        )
        if executor == "streams":
            pool.executor = StreamsExecutor(pool.task, pool.config.training)
        return pool

    pool = make()

    weights, metrics = train_hosts(pool, seeded=True)
    expected_weights, expected_metrics = train_hosts(make(), seeded=False)

    assert [slot.stage for slot in pool.envs[1].slots] == [Stage.TRAINING] * 3
    assert same(metrics, expected_metrics)
    for found, expected in zip(weights, expected_weights, strict=True):
        assert {name for name, value in expected.items() if not torch.equal(found[name], value)} == set()
