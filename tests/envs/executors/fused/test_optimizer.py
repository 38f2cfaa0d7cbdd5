"""One stacked step for all hosts and seeds, against a separate torch optimizer for each."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from esper_lightning.envs import HostPool
from esper_lightning.envs.executors.fused.arena import Arena
from esper_lightning.envs.executors.fused.optimizer import ParameterGroup, StackedOptimizer, state_names
from esper_lightning.envs.executors.fused.stacked_host import HostStack
from esper_lightning.growth.param_groups import HOST_GROUP, seed_group_name
from tests.envs.executors.fused.hosts import FAST_CONFIG, make
from tests.growth.grown import generator_of

RULES: list[dict[str, Any]] = [
    {"optimizer": "adam"},
    {"optimizer": "adam", "weight_decay": 0.1},
    {"optimizer": "adamw", "weight_decay": 0.1},
    {"optimizer": "sgd", "weight_decay": 0.1},
    {"optimizer": "sgd", "momentum": 0.0},
]


def grown_pool(**training: Any) -> HostPool:
    """Return a pool of 3 hosts, 2 of them with a seed; every group has its own learning rate and weight decay."""
    pool = make("loop", "mlp", 3, training=replace(FAST_CONFIG.training, **training))
    pool.reset(range(3))
    for env, blueprint in zip(pool.envs, ("norm", "lora"), strict=False):
        grow(env, "layer1", blueprint)
    return pool


def grow(env: Any, slot: str, blueprint: str) -> None:
    env.growing.germinate(slot, blueprint)
    for i, group in enumerate(env.optimizer.param_groups):
        group["lr"] *= 0.5 ** (i + env.rng_seed)
        group["weight_decay"] *= 2.0**i


def gradient(weight: nn.Parameter, i: int, step: int) -> torch.Tensor:
    """Return the gradient given to both optimizers."""
    return (step + 1) * torch.randn(weight.shape, generator=generator_of(100 * step + i), dtype=weight.dtype)


def settle(stack: HostStack, pool: HostPool) -> Arena:
    envs = pool.envs
    return stack.settle([env.network for env in envs], [env.optimizer for env in envs], state_names(envs[0].training))


def learn_stacked(pool: HostPool, steps: range, stack: HostStack) -> None:
    """Take this number of stacked steps in one epoch."""
    arena = settle(stack, pool)
    arena.bind(requires_grad=True)
    number = {p: i for env in pool.envs for i, p in enumerate(env.network.parameters())}
    hosts = [ParameterGroup(i, env, HOST_GROUP) for i, env in enumerate(pool.envs)]
    seeds = [
        ParameterGroup(i, pool.envs[i], seed_group_name(slot)) for members in stack.seed_slots for i, slot in members
    ]
    optimizer = StackedOptimizer(arena, hosts + seeds)
    for step in steps:
        arena.grads.copy_(arena.gather([gradient(p, number[p], step) for p in arena.parameters]))
        optimizer.step()


def learn_alone(pool: HostPool, steps: range, _: HostStack) -> None:
    for env in pool.envs:
        for step in steps:
            for i, p in enumerate(env.network.parameters()):
                p.grad = gradient(p, i, step)
            for group in env.optimizer.param_groups:
                if env.training.max_grad_norm is not None:
                    nn.utils.clip_grad_norm_(group["params"], env.training.max_grad_norm)
            env.optimizer.step()


@pytest.mark.parametrize("limit", [None, 3.0])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_any_rule_any_rates_and_any_number_of_steps(rule: dict[str, Any], limit: float | None) -> None:
    stacked, alone = (grown_pool(max_grad_norm=limit, **rule) for _ in range(2))
    for pool, learn in ((stacked, learn_stacked), (alone, learn_alone)):
        stack = HostStack(pool.envs[0].network)
        learn(pool, range(3), stack)
        grow(pool.envs[2], "layer2", "norm")  # its step count begins here
        learn(pool, range(3, 5), stack)
        pool.envs[0].growing.remove_seed("layer1")
        learn(pool, range(5, 7), stack)

    for ours, theirs in zip(stacked.envs, alone.envs, strict=True):
        for a, b in zip(ours.network.parameters(), theirs.network.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
            kept, expected = ours.optimizer.state[a], theirs.optimizer.state[b]
            assert kept.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(kept[name], value, rtol=1e-10, atol=1e-12)


def test_hosts_that_are_not_healthy_stay_as_they_are() -> None:
    pool, same = grown_pool(), grown_pool()
    stack = HostStack(pool.envs[0].network)
    arena = settle(stack, pool)
    arena.bind(requires_grad=True)
    seeds = [
        ParameterGroup(i, pool.envs[i], seed_group_name(slot)) for members in stack.seed_slots for i, slot in members
    ]
    optimizer = StackedOptimizer(arena, [ParameterGroup(i, env, HOST_GROUP) for i, env in enumerate(pool.envs)] + seeds)
    for healthy in (True, False):
        arena.grads.fill_(1.0 if healthy else float("nan"))
        optimizer.step(torch.tensor([True, healthy, True]))

    counted = [[env.optimizer.state[p]["step"].item() for p in env.network.parameters()] for env in pool.envs]
    assert [set(steps) for steps in counted] == [{2.0}, {1.0}, {2.0}]
    for i, env in enumerate(pool.envs):
        assert all(p.isfinite().all() == (i == 1) for p in env.network.parameters())
        assert not any(
            torch.equal(a, b) for a, b in zip(env.network.parameters(), same.envs[i].network.parameters(), strict=True)
        )
