"""Parameter groups are added and removed without side effects; a reset equals a new optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from esper_lightning.growth import GrowingNetwork, attach_slots
from esper_lightning.growth.param_groups import add_group, remove_group


@pytest.mark.parametrize("together", [True, False])
def test_an_optimizer_that_knows_names_keeps_each_with_its_parameter(together: bool) -> None:
    host, seed, newcomer = (nn.Linear(3, 2) for _ in range(3))
    pair = nn.ModuleDict({"host": host, "seed": seed})
    optimizer = Adam((pair if together else host).named_parameters())
    add_group(optimizer, "block1", seed)
    add_group(optimizer, "block2", newcomer)
    held = [dict(zip(group["param_names"], group["params"], strict=True)) for group in optimizer.param_groups]
    assert [list(group) for group in held] == [
        ["host.weight", "host.bias"] if together else ["weight", "bias"],
        ["block1.weight", "block1.bias"],
        ["block2.weight", "block2.bias"],
    ]
    for group, module in zip(held, (host, seed, newcomer), strict=True):
        assert all(parameter is group[name] for name, parameter in zip(group, module.parameters(), strict=True))
    remove_group(optimizer, "block1")
    newcomer(host(torch.ones(1, 3)).mean() * torch.ones(1, 3)).sum().backward()
    optimizer.step()


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
