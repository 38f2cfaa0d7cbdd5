"""Hosts of several tasks in one pool: each behaves as in a pool of its own, with common slots."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from esper_lightning.envs import ActionConfig, HostPool, MixedPool, Op
from esper_lightning.envs.env_factory import SharedSpace, pad_slots, union_of_slots
from esper_lightning.envs.family import FamilyConfig
from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.hosts import MLP
from esper_lightning.tasks import Digits, Synthetic, Task, TaskData
from tests.conftest import SMALL, small_host
from tests.decisions import CPU, Row, act, decide
from tests.tiers import rest_is_slow

TABLE = Synthetic(shape=[6], classes=3, train=64, validation=32, test=32)
IMAGES = Digits(validation=100, test=100)
SEEDS = [11, 12, 13]


def mlp(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Host with two slots, one fewer than the hosts of the image task."""
    return MLP(input_shape, outputs, width=4, layers=2)


KINDS: dict[str, tuple[Task, TaskData, Any, list[str]]] = {
    "images": (IMAGES, IMAGES.load(), small_host, ["norm", "conv_small"]),
    "table": (TABLE, TABLE.load(), mlp, ["lora", "norm"]),
}


def pool_of(
    kind: str,
    n_envs: int,
    common: SharedSpace | None = None,
    *,
    executor: Any = "loop",
    blueprints: list[str] | None = None,
) -> HostPool:
    task, data, host, usual = KINDS[kind]
    actions = ActionConfig(blueprints=blueprints or usual, tempos=SMALL.actions.tempos)
    config = replace(SMALL, executor=executor, actions=actions)
    return HostPool(task, data, host, config=config, n_envs=n_envs, device=CPU, shared_space=common)


@pytest.fixture(scope="module")
def common() -> SharedSpace:
    pools = [pool_of(kind, 1) for kind in KINDS]
    return union_of_slots([pool.space for pool in pools])


def mixed_pool(common: SharedSpace, executor: Any = "loop") -> MixedPool:
    return MixedPool({kind: pool_of(kind, n, common, executor=executor) for kind, n in (("images", 2), ("table", 1))})


ACTIONS: list[tuple[Op, int, str]] = [
    (Op.GERMINATE, 0, "norm"),
    (Op.GERMINATE, 1, "norm"),
    (Op.WAIT, 0, "norm"),
    (Op.FOSSILIZE, 0, "norm"),
    (Op.CULL, 1, "norm"),
    (Op.WAIT, 0, "norm"),
]
"""Actions of every host, tick by tick."""


def decision(step: tuple[Op, int, str], pool: HostPool | MixedPool) -> Row:
    op, slot, blueprint = step
    if op is Op.WAIT:
        return decide(op)
    more = {"blueprint": pool.space.blueprint.index(blueprint)} if op is Op.GERMINATE else {}
    return decide(op, slot=slot, **more)


@pytest.mark.parametrize("executor", rest_is_slow(["loop", "threads", "fused"], {"fused"}))
def test_every_host_lives_as_it_would_in_a_pool_of_its_own(common: SharedSpace, executor: str) -> None:
    mixed = mixed_pool(common, executor)
    alone = [pool_of("images", 2, executor=executor), pool_of("table", 1, executor=executor)]
    mixed.reset(SEEDS)
    alone[0].reset(SEEDS[:2])
    alone[1].reset(SEEDS[2:])

    for step in ACTIONS:
        together = mixed.step(act(*[decision(step, mixed)] * 3))
        apart = [pool.step(act(*[decision(step, pool)] * pool.n_envs)) for pool in alone]
        for name in ("score", "loss", "objective", "parameters", "reward"):
            parts = torch.cat([getattr(result.metrics, name) for result in apart])
            assert torch.equal(getattr(together.metrics, name), parts), (step, name)
        assert [event.host for event in together.events] == [
            event.host + begin for result, begin in zip(apart, (0, 2), strict=True) for event in result.events
        ]
    assert together.truncated.all() and together.metrics.parameters[2] > 70


def test_a_slot_that_a_host_lacks_is_masked_and_absent(common: SharedSpace) -> None:
    mixed = mixed_pool(common)
    mixed.reset(SEEDS)

    for step in ACTIONS:
        assert not mixed.masks.slot[2, Op.GERMINATE :, 2].any() and not mixed.masks.blueprint[2, 2].any()
        assert not mixed.observation.features[2, 2, mixed.rows.host :].any()
        mixed.step(act(*[decision(step, mixed)] * 3))

    conv_small, lora = (mixed.space.blueprint.index(name) for name in ("conv_small", "lora"))
    assert mixed.masks.blueprint[:, 0, conv_small].tolist() == [True, True, False]
    assert mixed.masks.blueprint[:, 0, lora].tolist() == [False, False, True]


def test_a_state_goes_on_bit_for_bit(common: SharedSpace) -> None:
    first, second = mixed_pool(common), mixed_pool(common)
    first.reset(SEEDS)
    for step in ACTIONS[:3]:
        first.step(act(*[decision(step, first)] * 3))

    assert second.load_state_dict(first.state_dict()) is None

    assert torch.equal(first.observation.features, second.observation.features)
    for step in ACTIONS[3:]:
        results = [pool.step(act(*[decision(step, pool)] * 3)) for pool in (first, second)]
        assert torch.equal(results[0].observation.features, results[1].observation.features)
        assert torch.equal(results[0].metrics.loss, results[1].metrics.loss)


def test_hosts_lie_side_by_side_by_task(common: SharedSpace) -> None:
    mixed = mixed_pool(common)

    assert mixed.envs == [*mixed.pools["images"].envs, *mixed.pools["table"].envs]
    assert mixed.task_slices == {"images": slice(0, 2), "table": slice(2, 3)}
    assert mixed.privileged.tolist() == [[1, 0], [1, 0], [0, 1]]


def test_what_each_pool_hides_lies_in_columns_of_its_own(common: SharedSpace) -> None:
    pools = {kind: pool_of(kind, 2, common) for kind in KINDS}
    family = FamilyConfig(train=[{"training.lr": [0.01, 0.02, 0.04]}])
    task, data, host, _ = KINDS["images"]
    config = replace(pools["images"].config, family=family)
    pools["images"] = HostPool(task, data, host, config=config, n_envs=2, device=CPU, shared_space=common)
    mixed = MixedPool(pools)

    for seeds in ([1, 2, 3, 4], [5, 6, 7, 8]):
        mixed.reset(seeds)
        hidden = pools["images"].privileged
        assert hidden is not None and hidden.any()
        assert torch.equal(mixed.privileged[:2, 2:], hidden) and not mixed.privileged[2:, 2:].any()
        assert mixed.privileged[:, :2].tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]


def test_each_task_offers_what_it_was_told_to_and_no_more() -> None:
    """Blueprints of both tasks can grow on the hosts of both."""
    offers = ["norm"], ["conv_small", "norm"]
    both = union_of_slots([pool_of("images", 1, blueprints=offer).space for offer in offers])

    pools = [pool_of("images", 1, both, blueprints=offer) for offer in offers]

    assert both.blueprints == ["norm", "conv_small"]
    assert [pool.masks.blueprint[0, 0].tolist() for pool in pools] == [[True, False], [True, True]]


def test_a_host_that_is_a_sequence_of_layers_can_lack_a_place(common: SharedSpace) -> None:
    host = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    attach_slots(host, ["2"], torch.randn(2, 6))
    x = torch.randn(5, 6)
    before = host(x)

    pad_slots(host, common.slots, CPU)

    assert torch.equal(host(x), before)
    assert list(slots_of(host)) == ["place1", "place2", "place3"]
