"""Helpers for networks that are grown by explicit operations."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.lifecycle import SeedEvent
from esper_lightning.growth.slot import Layout
from esper_lightning.growth.stages import Stage
from tests.growth.grown import LIFE, batch_of, generator_of, host_of, loss_on, story

Make = Callable[[nn.Module], Optimizer]

EAGER = LifecycleConfig(
    training_ticks=0, embargo_ticks=0, min_contribution=None, min_gradient_health=0.0, auto_cull=False, min_cull_age=0
)


def growing(
    lifecycle: LifecycleConfig = EAGER, make: Make = lambda host: SGD(host.parameters(), lr=0.05), **options: Any
) -> GrowingNetwork:
    """Return a small CNN with the slots `block1` and `block2.pool` as a GrowingNetwork."""
    host = host_of("image")
    return GrowingNetwork(
        host, make(host), horizon=50, lifecycle=lifecycle, **({"generator": generator_of(1)} | options)
    )


def learn(network: nn.Module, optimizer: Optimizer, step: int, layout: Layout = "image") -> float:
    network.train()
    optimizer.zero_grad()
    loss = loss_on(network, batch_of(layout, seed=step))
    loss.backward()
    optimizer.step()
    return loss.item()


def epoch(
    network: GrowingNetwork, step: int = 0, contribution: dict[str, float] | None = None, hold: bool = False
) -> list[SeedEvent]:
    learn(network.module, network.optimizer, step)
    return network.end_epoch(contribution, hold=hold)


def grow_to_stage(
    network: GrowingNetwork, slot: str, stage: Stage, blueprint: str = "conv_small", **options: Any
) -> None:
    """Grow a seed to `stage`, one epoch in each stage; seeds in other slots stay as they are."""
    network.germinate(slot, blueprint, **({"ticks": 1} | options))
    for then in LIFE[1 : LIFE.index(stage) + 1]:
        if then in (Stage.BLENDING, Stage.PROBATIONARY):
            network.slots[slot].move_to(then)
        if then is Stage.FOSSILIZED:
            network.fossilize(slot)
        else:
            epoch(network, contribution={slot: 2.0}, hold=True)
    assert network.slots[slot].stage is stage


def optimizer_state(network: GrowingNetwork, except_slot: str = "") -> dict[str, list[Tensor]]:
    """Return the optimizer's state of every parameter by name, except those of the seed in one slot."""
    left_out = set() if not except_slot else set(network.slots[except_slot].seed.parameters())
    return {
        name: [value.clone() for value in network.optimizer.state[parameter].values() if value is not None]
        for name, parameter in network.module.named_parameters()
        if parameter not in left_out and network.optimizer.state.get(parameter)
    }


def same_optimizer_state(first: dict[str, list[Tensor]], second: dict[str, list[Tensor]]) -> bool:
    return list(first) == list(second) and all(
        torch.equal(a, b) for name in first for a, b in zip(first[name], second[name], strict=True)
    )


def check_optimizer_matches(network: GrowingNetwork) -> None:
    """Assert that the optimizer holds each parameter of the network exactly once, and no other state."""
    held = [id(p) for group in network.optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in network.module.parameters())
    assert {id(p) for p in network.optimizer.state} <= set(held)


def trace(network: GrowingNetwork) -> tuple[Any, ...]:
    """Return all that a refused operation must not change: growth, measurements, weights, optimizer, generator."""
    return (
        story(network.module),
        deepcopy(network.measurements),
        [value.tolist() for value in network.module.state_dict().values() if isinstance(value, Tensor)],
        [id(p) for group in network.optimizer.param_groups for p in group["params"]],
        [(id(value), value.tolist()) for state in network.optimizer.state.values() for value in state.values()],
        network.generator.get_state().tolist(),
    )


def check_refused(network: GrowingNetwork, attempt: Callable[[], Any], message: str) -> None:
    """Assert that an attempt raises a ValueError that begins with this message, and changes nothing."""
    before = trace(network)
    with pytest.raises(ValueError) as refusal:
        attempt()
    assert str(refusal.value).startswith(message)
    assert trace(network) == before
