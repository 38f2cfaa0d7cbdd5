"""Parameter groups are added and removed without side effects; a reset equals a new optimizer."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from esper_lightning.growth import GrowingNetwork, attach_slots
from esper_lightning.growth.param_groups import (
    HOST_GROUP,
    add_group,
    remove_group,
)
from tests.growth.grown import generator_of

Make = Callable[[nn.Module], Optimizer]


def host_group(module: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(module.parameters()), "name": HOST_GROUP}]


MAKERS = [
    pytest.param(lambda host: Adam(host_group(host), lr=0.05, fused=True), id="adam"),
    pytest.param(lambda host: AdamW(host_group(host), lr=0.05, weight_decay=0.1, fused=True), id="adamw"),
    pytest.param(lambda host: SGD(host_group(host), lr=0.05, momentum=0.9, fused=True), id="sgd"),
    pytest.param(lambda host: SGD(host_group(host), lr=0.05), id="plain sgd"),
]

every_optimizer = pytest.mark.parametrize("make", MAKERS)


def linear(seed: int) -> nn.Linear:
    module = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator_of(seed)))
    return module


def learn(optimizer: Optimizer, modules: list[nn.Module], steps: range) -> None:
    """Take one optimizer step for each number in `steps`, on a batch drawn with that RNG seed."""
    for step in steps:
        x = torch.randn(5, 3, generator=generator_of(100 + step))
        optimizer.zero_grad()
        sum(module(x).square().mean() for module in modules).backward()
        optimizer.step()


def weights_and_state(optimizer: Optimizer, module: nn.Module) -> Iterator[Tensor]:
    """Return weights and their optimizer state."""
    for parameter in module.parameters():
        yield parameter
        yield from (value for _, value in sorted(optimizer.state[parameter].items()) if value is not None)


def same(first: tuple[Optimizer, nn.Module], second: tuple[Optimizer, nn.Module]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights_and_state(*first), weights_and_state(*second), strict=True))


@every_optimizer
def test_nothing_is_left_of_a_removed_seed(make: Make) -> None:
    host, seed = linear(0), linear(1)
    optimizer = make(host)
    add_group(optimizer, "block1", seed)
    learn(optimizer, [host, seed], range(2))
    remove_group(optimizer, "block1")
    kept = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert kept == {id(parameter) for parameter in host.parameters()}
    assert {id(parameter) for parameter in optimizer.state} <= kept
    before = seed.weight.clone()
    learn(optimizer, [host, seed], range(2, 4))
    assert torch.equal(seed.weight, before)


class Pair(nn.Module):
    """Module that contains another module."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.seed = linear(0), linear(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.host(x) + self.seed(x)


@every_optimizer
def test_a_module_of_another_group_moves_to_its_own_with_what_is_remembered_of_it(make: Make) -> None:
    moved, alone = Pair(), Pair()
    optimizer, lone = make(moved), make(alone)
    learn(optimizer, [moved], range(3))
    add_group(optimizer, "block1", moved.seed)
    learn(optimizer, [moved], range(3, 6))
    learn(lone, [alone], range(6))
    assert same((optimizer, moved), (lone, alone))
    groups = {group["name"]: group["params"] for group in optimizer.param_groups}
    assert [*map(id, groups[HOST_GROUP])] == [*map(id, moved.host.parameters())]
    assert [*map(id, groups["block1"])] == [*map(id, moved.seed.parameters())]


@pytest.mark.parametrize("together", [True, False])
def test_an_optimizer_that_knows_names_keeps_each_with_its_parameter(together: bool) -> None:
    pair, newcomer = Pair(), linear(2)
    optimizer = Adam(pair.named_parameters() if together else pair.host.named_parameters())
    add_group(optimizer, "block1", pair.seed)
    add_group(optimizer, "block2", newcomer)
    held = [dict(zip(group["param_names"], group["params"], strict=True)) for group in optimizer.param_groups]
    assert [list(group) for group in held] == [
        ["host.weight", "host.bias"] if together else ["weight", "bias"],
        ["block1.weight", "block1.bias"],
        ["block2.weight", "block2.bias"],
    ]
    for group, module in zip(held, (pair.host, pair.seed, newcomer), strict=True):
        assert all(parameter is group[name] for name, parameter in zip(group, module.parameters(), strict=True))
    remove_group(optimizer, "block1")
    learn(optimizer, [pair.host, newcomer], range(2))


class Mixed(Optimizer):
    """Has an option that every group names itself, as Muon beside Adam, or timm's `lr_scale`."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * group["lr_scale"])


class Sam(Optimizer):
    """Shares its groups with an inner optimizer, which holds the state, if it is told to."""

    def __init__(self, params: Any, shares: bool = True) -> None:
        super().__init__(params, {"rho": 0.05})
        inner = self.param_groups if shares else [dict(group) for group in self.param_groups]
        self.inner = SGD(inner, lr=0.1, momentum=0.9)
        if shares:
            self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def grown_by(make: Callable[[nn.Module], Optimizer], **settings: Any) -> tuple[GrowingNetwork, Tensor]:
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(32, 8)
    attach_slots(network, ["1"], x)
    growing = GrowingNetwork(network, make(network), horizon=9, **settings)
    growing.germinate("1", "mlp", stage="BLENDING", ticks=1)
    network(x).square().mean().backward()
    growing.optimizer.step()
    return growing, x


def test_a_seed_has_all_options_of_the_first_group() -> None:
    growing, _ = grown_by(
        lambda network: Mixed([{"params": list(network.parameters()), "lr_scale": 0.5}]), seed_options={"lr_scale": 2.0}
    )

    host, seed = growing.optimizer.param_groups
    assert (host["lr_scale"], seed["lr_scale"], seed["lr"]) == (0.5, 2.0, 0.1)


def test_an_inner_optimizer_trains_a_seed_and_forgets_it() -> None:
    growing, _ = grown_by(lambda network: Sam(network.parameters()))
    inner, seed = growing.optimizer.inner, growing.slots["1"].seed  # type: ignore[attr-defined]

    assert all(parameter in inner.state for parameter in seed.parameters())
    growing.cull_live_seeds("test")
    assert len(inner.param_groups) == 1 and not any(parameter in inner.state for parameter in seed.parameters())


def test_an_inner_optimizer_that_would_not_train_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="Sam holds a SGD that does not share its parameter groups"):
        grown_by(lambda network: Sam(network.parameters(), shares=False))
