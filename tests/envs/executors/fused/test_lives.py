"""Rare events of hosts and seeds have the same effect in a stack as in the loop."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from esper_lightning.blueprints import registry
from esper_lightning.blueprints.registry import Blueprint
from esper_lightning.blueprints.residual import Residual
from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.envs.executors import FusedExecutor
from esper_lightning.envs.executors.fused import epoch
from esper_lightning.envs.host_training import ConvolutionMethod
from esper_lightning.hosts import CNN
from esper_lightning.tasks import AugmentConfig
from tests.conftest import FREE
from tests.envs.executors.fused.hosts import FAST_CONFIG, HOSTS, distance, make, play, precision
from tests.tiers import rest_is_slow

EXACT = 1e-9

TRAINING = FAST_CONFIG.training


def both(host: str = "cnn", n_envs: int = 3, **changes: Any) -> tuple[HostPool, HostPool]:
    return make("fused", host, n_envs, **changes), make("loop", host, n_envs, **changes)


def assert_equal(fused: HostPool, loop: HostPool) -> None:
    assert distance(fused, loop) < EXACT
    for ours, theirs in zip(fused.envs, loop.envs, strict=True):
        assert ours.history.loss == pytest.approx(theirs.history.loss, rel=EXACT, nan_ok=True)


@pytest.mark.parametrize("host", rest_is_slow(["cnn", "residual"], {"cnn"}))
def test_all_that_a_controller_may_choose(host: str) -> None:
    pools = both(host, 4, **FREE | {"horizon": 20})
    causes: set[str] = set()
    for pool in pools:
        wanderer = RandomValid(3)
        with precision(torch.float64):
            pool.reset(range(4))
            for _ in range(20):
                events = pool.step(wanderer.act(pool)).events
                causes |= {event.seed_event.cause.partition(" in ")[0] for event in events}

    assert_equal(*pools)
    assert causes >= {"cull", "fossilize"}


@pytest.mark.parametrize("host", ["cnn", "residual"])
def test_varied_images(host: str) -> None:
    pools = both(host, training=replace(TRAINING, augment=AugmentConfig(pad=1, flip=True, cutout=3)))
    for pool in pools:
        play(pool, 4)

    assert_equal(*pools)


@pytest.mark.parametrize("onednn", [True, False])
def test_whoever_runs_convolutions(onednn: bool) -> None:
    fused, loop = both(dtype=torch.float32, training=replace(TRAINING, onednn=onednn))
    ours, theirs = play(fused, 4), play(loop, 4)

    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-4, atol=0.0)
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("method", rest_is_slow(["grouped", "products"], {"products"}))
def test_whichever_way_convolutions_are_computed(method: ConvolutionMethod) -> None:
    fused = make("fused", "cnn", 3, training=replace(TRAINING, convolutions=method))
    loop = make("loop", "cnn", 3)
    for pool in (fused, loop):
        play(pool, 5)

    assert_equal(fused, loop)
    (stack,) = fused.executor.stacks.values()
    seeds = [bank for slot in stack.slots.values() for bank in slot.seeds_by_kind.values()]
    assert {bank.stack_index.convolutions for bank in (stack, *seeds)} == {method}
    assert seeds


def test_seeds_with_running_statistics_in_hosts_that_are_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recomputation of activations must not update running statistics."""

    def normed(channels: int) -> nn.Module:
        return Residual(nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 1))

    blueprint = Blueprint("normed", frozenset({"image"}), normed, lambda c: c * c + 3 * c, lambda c, n: 0, None)
    monkeypatch.setitem(registry._BLUEPRINTS, ("image", "normed"), blueprint)
    monkeypatch.setitem(HOSTS, "twice", partial(CNN, base=4, pools=1, blocks=2, checkpoint_activations=True))
    pools = both("twice", actions=ActionConfig(blueprints=["normed", "norm"], tempos={"FAST": 1}))
    for pool in pools:
        play(pool, 8)

    assert_equal(*pools)
    grown = [name for env in pools[0].envs for name in env.network.state_dict() if "seed" in name]
    assert any("running_mean" in name for name in grown)


def test_some_of_the_hosts_by_turns_and_another_number_of_them() -> None:
    fused, loop = both(n_envs=4)
    for pool in (fused, loop):
        pool.reset(range(4))
        pool.envs[2].growing.germinate("block1", "norm")
        pool.envs[3].growing.germinate("block1", "conv_small", style="gate")
        for some in ([3], [2, 0], [0, 1, 2, 3], [1, 3]):
            pool.executor.train_epoch([pool.envs[i] for i in some], pool.data.train)
    measured = [pool.executor.validate(pool.envs[1:], pool.data.validation) for pool in (fused, loop)]

    assert_equal(fused, loop)
    torch.testing.assert_close(*measured, rtol=EXACT, atol=EXACT)


def test_a_stack_may_take_over_when_much_has_grown() -> None:
    """The stack first meets these hosts and seeds in a validation pass."""
    turns, loop = make("loop", "cnn", 3), make("loop", "cnn", 3)
    for pool in (turns, loop):
        play(pool, 8)
    turns.executor = FusedExecutor(turns.task, turns.config.training)
    turns.test_accuracy()
    for pool in (turns, loop):
        pool.train_without_actions(2)

    assert_equal(turns, loop)


def test_an_epoch_that_broke_off_leaves_hosts_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make("fused", "cnn", 2)
    pool.reset([0, 1])
    pool.train_without_actions(1)
    before = [p.detach().clone() for env in pool.envs for p in env.network.parameters()]

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(epoch, "fetch", broken)
        pool.train_without_actions(1)

    assert all(map(torch.equal, before, (p for env in pool.envs for p in env.network.parameters())))
    pool.train_without_actions(1)
    assert pool.envs[0].history.loss[-1] < pool.envs[0].history.loss[0]


def test_a_host_alone_is_a_stack_too() -> None:
    pools = both("residual", 1)
    for pool in pools:
        play(pool, 12)

    assert_equal(*pools)
