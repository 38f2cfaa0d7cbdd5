"""Parameter groups of seeds, by themselves and under every learning-rate scheduler of PyTorch."""

import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from esper_lightning.growth import GrowingNetwork, attach_slots
from esper_lightning.growth.param_groups import add_group, find_group, follow, host_groups, remove_group, seed_groups
from tests.growth.by_hand import EAGER, learn
from tests.growth.grown import generator_of, host_of


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


def test_a_count_that_steps_change_in_place_is_of_each_group() -> None:
    host, seed = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = Mixed([{"params": [*host.parameters()], "lr_scale": 1.0, "count": torch.zeros(())}])
    add_group(optimizer, "seed.1", seed)

    optimizer.param_groups[0]["count"] += 1
    assert [float(group["count"]) for group in optimizer.param_groups] == [1.0, 0.0]


def test_an_inner_optimizer_trains_a_seed_and_forgets_it() -> None:
    growing, _ = grown_by(lambda network: Sam(network.parameters()))
    inner, seed = growing.optimizer.inner, growing.slots["1"].seed  # type: ignore[attr-defined]

    assert all(parameter in inner.state for parameter in seed.parameters())
    growing.cull_live_seeds("test")
    assert len(inner.param_groups) == 1 and not any(parameter in inner.state for parameter in seed.parameters())


def test_an_inner_optimizer_that_would_not_train_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="Sam holds a SGD that does not share its parameter groups"):
        grown_by(lambda network: Sam(network.parameters(), shares=False))


# Schedulers.


STEPS = 12

Make = Callable[[Optimizer], LRScheduler]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 0.9**step, lambda step: 0.8**step]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 7], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 7),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, 0.001),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, min_lr=[1e-3, 1e-4]),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [0.01, 0.02], [0.1, 0.2], 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.05], total_steps=STEPS + 1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, STEPS - 4)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.LambdaLR(o, lambda step: 0.9**step)]
    ),
}

every_scheduler = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in SCHEDULERS.items()])


def test_every_scheduler_of_pytorch_is_tested_here() -> None:
    classes = [getattr(lr_scheduler, name) for name in lr_scheduler.__all__]
    assert {kind.__name__ for kind in classes if kind is not LRScheduler} == set(SCHEDULERS)


def two_groups(seed_options: dict[str, Any] | None = None) -> GrowingNetwork:
    """Return a growing network whose host has two parameter groups."""
    network = host_of("vector")
    head = list(network.head.parameters())
    rest = [p for p in network.parameters() if all(p is not q for q in head)]
    optimizer = SGD([{"params": rest}, {"params": head, "lr": 0.05}], lr=0.1, momentum=0.9)
    return GrowingNetwork(
        network, optimizer, horizon=50, lifecycle=EAGER, generator=generator_of(3), seed_options=seed_options
    )


def change(growing: GrowingNetwork, step: int) -> None:
    """Germinate two seeds, the last slot first, and cull that one."""
    if step in (2, 4):
        growing.germinate("second" if step == 2 else "first", "mlp_small")
    if step == 7:
        growing.cull("second")


def take_steps(growing: GrowingNetwork, scheduler: LRScheduler, steps: Iterable[int], grow: bool = True) -> list[Any]:
    """Train and return the options of the host's groups that schedulers change, after each step."""
    seen = []
    for step in steps:
        if grow:
            change(growing, step)
        learn(growing.module, growing.optimizer, step, "vector")
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([1.0] if plateau else []))
        seen.append([(group["lr"], group["momentum"]) for group in host_groups(growing.optimizer)])
    return seen


@every_scheduler
def test_the_host_has_the_learning_rates_that_it_has_without_growth(make: Make) -> None:
    grown, alone = two_groups(), two_groups()
    scheduler, undisturbed = follow(make(grown.optimizer), grown), make(alone.optimizer)
    rates = take_steps(grown, scheduler, range(STEPS))
    assert rates == take_steps(alone, undisturbed, range(STEPS), grow=False)
    assert scheduler.get_last_lr() == undisturbed.get_last_lr() == [rate for rate, _ in rates[-1]]
    assert [group["name"] for group in seed_groups(grown.optimizer)] == ["seed.first"]


@every_scheduler
def test_a_seed_follows_the_host_at_its_own_rate(make: Make) -> None:
    same, own = two_groups(), two_groups({"lr": 0.02, "momentum": 0.5})
    nominal = 0.1  # given to the optimizer, or the peak of a cycle
    for growing in (same, own):
        scheduler = follow(make(growing.optimizer), growing)
        for step in range(STEPS):
            take_steps(growing, scheduler, [step])
            hosts = dict(growing.optimizer.param_groups[0])
            learn(growing.module, growing.optimizer, step, "vector")
            for group in seed_groups(growing.optimizer):
                if growing is same:
                    assert (group["lr"], group["momentum"]) == (hosts["lr"], hosts["momentum"])
                else:
                    assert group["lr"] == pytest.approx(0.02 * hosts["lr"] / nominal)
                    assert group["momentum"] == 0.5


@every_scheduler
def test_a_run_that_was_stopped_goes_on_with_its_schedule(make: Make) -> None:
    growing = two_groups({"lr": 0.02})
    scheduler = follow(make(growing.optimizer), growing)
    take_steps(growing, scheduler, range(6))
    file = io.BytesIO()
    torch.save([growing.state_dict(), scheduler.state_dict()], file)
    rates = take_steps(growing, scheduler, range(6, STEPS))

    resumed = two_groups({"lr": 0.02})
    file.seek(0)
    saved, schedule = torch.load(file, weights_only=False)
    again = follow(make(resumed.optimizer), resumed)
    resumed.load_state_dict(saved)
    again.load_state_dict(schedule)

    assert take_steps(resumed, again, range(6, STEPS)) == rates
    theirs = growing.module.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in resumed.module.state_dict().items())


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, min_lr=1e-3),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS),
    ],
)
def test_a_scheduler_may_be_made_when_a_seed_is_there_already(make: Make) -> None:
    grown, alone = two_groups(), two_groups()
    grown.germinate("first", "mlp_small")
    rates = take_steps(grown, follow(make(grown.optimizer), grown), range(5), grow=False)
    assert rates == take_steps(alone, make(alone.optimizer), range(5), grow=False)


def test_a_seed_learns_at_the_rate_of_the_step_and_not_of_the_one_before() -> None:
    growing = two_groups()
    scheduler = follow(lr_scheduler.LambdaLR(growing.optimizer, lambda step: float(step < 3)), growing)
    take_steps(growing, scheduler, range(3))  # a seed germinates at step 2
    assert find_group(growing.optimizer, "seed.second")["lr"] == 0.1
    before = [p.clone() for p in growing.slots["second"].seed.parameters()]
    learn(growing.module, growing.optimizer, 3, "vector")
    assert find_group(growing.optimizer, "seed.second")["lr"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, growing.slots["second"].seed.parameters(), strict=True))


def test_a_scheduler_passes_for_one_of_its_optimizer_and_follows_twice_as_once() -> None:
    growing, other = two_groups(), two_groups()
    scheduler = SCHEDULERS["SequentialLR"](growing.optimizer)
    assert follow(follow(scheduler, growing), growing) is scheduler
    assert isinstance(scheduler.optimizer, SGD)
    assert growing.optimizer in [scheduler.optimizer]
    assert other.optimizer not in [scheduler.optimizer]
    with pytest.raises(ValueError, match="the SequentialLR schedules another optimizer"):
        follow(scheduler, other)
