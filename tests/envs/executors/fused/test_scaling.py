"""Stacked loss scales of many hosts, against a separate torch scaler for each."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper_lightning.envs import HostPool
from esper_lightning.envs.executors import LoopExecutor
from esper_lightning.envs.executors.fused.optimizer import StackedScaler
from esper_lightning.envs.host_training import INITIAL_LOSS_SCALE, HostTraining
from tests.envs.executors.episodes import same
from tests.envs.executors.fused.hosts import make
from tests.growth.grown import CPU

patterns = st.lists(st.tuples(*[st.booleans()] * 3), min_size=1, max_size=12)
"""Strategy: whether each of 3 hosts has finite gradients, by step."""


class Scaled(NamedTuple):
    """The parts of an environment that `StackedScaler` uses."""

    scaler: torch.amp.GradScaler
    device: torch.device = CPU


def scaler(first: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", first, growth_interval=3)


def step(scaler: torch.amp.GradScaler, healthy: bool) -> None:
    """Take one step with torch's own scaler, which may skip it."""
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight).backward()
    weight.grad.fill_(1.0 if healthy else float("inf"))
    scaler.step(optimizer)
    scaler.update()


@given(pattern=patterns, epochs=st.integers(1, 4), power=st.sampled_from([-126, 12, 127]))
def test_whatever_overflows_scales_are_those_of_torch(pattern: list[tuple[bool, ...]], epochs: int, power: int) -> None:
    envs = [Scaled(scaler(2.0**power)) for _ in range(3)]
    alone = [scaler(2.0**power) for _ in envs]
    for _ in range(epochs):
        ours = StackedScaler(envs)
        for healthy in pattern:
            ours.update(torch.tensor(healthy))
            for own, well in zip(alone, healthy, strict=True):
                step(own, well)
        ours.write_back()

    assert [env.scaler.state_dict() for env in envs] == [own.state_dict() for own in alone]


def half_pool(executor: str) -> HostPool:
    """Return a pool of 3 hosts in fp16 with training and blended seeds; the second host overflows."""
    pool = make(
        executor, "cnn", 3, torch.float32, training=HostTraining(lr=0.02, batches=4, batch_size=16, precision="fp16")
    )
    pool.reset(range(3))
    for env in pool.envs:
        env.growing.germinate("block1", "conv_light", ticks=1)
    pool.train_without_actions(2)
    for env in pool.envs:
        env.growing.germinate("block3", "conv_small", style="gate")
    pool.train_without_actions(1)
    with torch.no_grad():
        pool.envs[1].slots[0].seed.body[0].weight.fill_(1e6)
    return pool


def tensors(pool: HostPool, host: int) -> list[Tensor]:
    """Return weights and optimizer state of a host and its seeds."""
    env = pool.envs[host]
    states = [env.optimizer.state[p] for group in env.optimizer.param_groups for p in group["params"]]
    kept = [*env.network.parameters(), *(value for state in states for value in state.values())]
    return [tensor.detach().clone() for tensor in kept]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_host_out_of_range_is_skipped_alone_with_all_its_seeds(optimizer: str) -> None:
    pool = half_pool("fused")
    before = [tensors(pool, host) for host in range(3)]
    pool.train_without_actions(1)

    assert [env.skipped_steps for env in pool.envs] == [0, 4, 0]
    assert [env.scaler.get_scale() for env in pool.envs] == [
        INITIAL_LOSS_SCALE,
        INITIAL_LOSS_SCALE / 2**4,
        INITIAL_LOSS_SCALE,
    ]
    assert same(tensors(pool, 1), before[1])
    for host in (0, 2):
        assert not any(torch.equal(a, b) for a, b in zip(tensors(pool, host), before[host], strict=True))


def test_the_loop_goes_on_with_the_scales_that_the_stack_left() -> None:
    turns, loop = half_pool("fused"), half_pool("loop")
    for pool in (turns, loop):
        pool.train_without_actions(1)
        with torch.no_grad():
            pool.envs[1].slots[0].seed.body[0].weight.fill_(0.1)
    turns.executor = LoopExecutor(turns.task, turns.config.training)
    for pool in (turns, loop):
        pool.train_without_actions(1)

    states = [[env.scaler.state_dict() for env in pool.envs] for pool in (turns, loop)]
    assert states[0] == states[1]
    assert states[0][1]["scale"] < states[0][0]["scale"]
    assert [env.skipped_steps for env in turns.envs] == [env.skipped_steps for env in loop.envs]
    assert states[0][0]["_growth_tracker"] == 4 * 5, "steps since the last one that was skipped"
