"""Hosts of a pool train bit for bit as without seeds while these learn, with every executor and isolation."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.envs.executors.streams import StreamsExecutor
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.spaces.observation import slot_features
from esper_lightning.growth.blend import Isolation
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.ranks import ALONE
from esper_lightning.telemetry.metrics import tick_metrics
from esper_lightning.telemetry.observer import join, observe
from tests.decisions import WAIT, act, germinate
from tests.envs.executors.episodes import same
from tests.envs.executors.fake_cuda import FakeCuda
from tests.tiers import rest_is_slow

MakePool = Callable[..., HostPool]


STYLES = ["linear_add", "linear_multiply", "linear_gate"]

TICKS = 3


def host_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the host's weights and statistics, without those of its seeds."""
    both = (*network.named_parameters(), *network.named_buffers())
    return {name: value.detach().clone() for name, value in both if ".seed." not in name and "alpha" not in name}


def train_hosts(pool: HostPool, seeded: bool) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Train two hosts on data in fixed order; if `seeded`, with a seed of another style in every slot of the second.

    Returns the hosts' weights, and accuracy and loss of each tick.
    """
    for i, env in enumerate(pool.envs):
        env.data_order = lambda rng_seed, tick, i=i: 100 * i + tick
    actions = [act(WAIT, germinate(k, blueprint=k, style=k) if seeded else WAIT) for k in range(TICKS)]
    metrics = []
    for action in actions:
        step = pool.step(action).metrics
        metrics += [step.accuracy, step.loss]
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
            actions=ActionConfig(styles=STYLES),
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


@pytest.mark.parametrize("executor", ["loop", "fused"])
def test_potentials_are_those_of_the_seeds_switched_on_one_by_one(make_pool: MakePool, executor: str) -> None:
    pool = make_pool(
        2,
        executor=executor,
        lifecycle=LifecycleConfig(training_ticks=2, min_potential=-100.0, auto_cull=False),
        actions=ActionConfig(styles=STYLES),
    )
    for row in (germinate(0, 2), WAIT, WAIT, germinate(1, 1, style=1), germinate(2, 2, style=2)):
        step = pool.step(act(WAIT, row))
    idle, env = pool.envs
    assert [slot.stage for slot in env.slots] == [Stage.BLENDING, Stage.TRAINING, Stage.TRAINING]
    assert [record.potential for record in idle.records] == [None] * 3

    inputs, targets = pool.data.validation
    for k in (1, 2):
        network = deepcopy(env.network).eval()
        for other, slot in enumerate(slots_of(network).values()):
            if other == k:
                for stage in (Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED):
                    slot.move_to(stage)
        slots_of(network)[env.slots[0].name].alpha.fill_(env.slots[0].alpha_before)
        with torch.no_grad():
            accuracy = (network(inputs).argmax(1) == targets).float().mean().item()
        expected = 100.0 * (accuracy - env.history.accuracy[-1])
        assert env.records[k].potential == pytest.approx(expected, abs=1e-4)
    plotted = (env.records[1].potential + env.records[2].potential) / 2
    written = tick_metrics(join([observe(pool, step, 5)], ALONE), pool.space.slot)
    assert written["growth/potential"] == pytest.approx(plotted)
    names = [name for name in pool.feature_names if "potential" in name]
    assert names == ["slot.potential.known", "slot.potential"]
    shown = slot_features(env, 1)
    assert shown["potential.known"] == 1.0
    assert shown["potential"] == pytest.approx(max(-1.0, min(1.0, env.records[1].potential / 10.0)))


def test_potentials_that_nobody_asks_for_are_neither_measured_nor_observed(make_pool: MakePool) -> None:
    pool = make_pool(1, lifecycle=LifecycleConfig(min_potential=None))
    pool.step(act(germinate(0, 2)))
    assert pool.envs[0].records[0].potential is None
    assert not any("potential" in name for name in pool.feature_names)
