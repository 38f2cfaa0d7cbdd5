"""Optimizer state of a network whose seeds come and go, and growth that is stopped and goes on."""

import io
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from esper_lightning.growth.export import load, save
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.growing_network import GrowingNetwork, SeedMeasurements
from esper_lightning.growth.param_groups import find_group, group_names
from esper_lightning.growth.stages import Stage
from tests.growth.by_hand import (
    EAGER,
    Make,
    check_optimizer_matches,
    epoch,
    grow_to_stage,
    growing,
    learn,
    optimizer_state,
    same_optimizer_state,
)
from tests.growth.grown import LIFE, generator_of, host_of, same_host, story

SLOW = LifecycleConfig(training_ticks=99, embargo_ticks=0, min_cull_age=0)

every_optimizer = pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda host: SGD(host.parameters(), lr=0.05, momentum=0.9), id="sgd"),
        pytest.param(lambda host: Adam(host.parameters(), lr=0.01), id="adam"),
        pytest.param(lambda host: AdamW(host.parameters(), lr=0.01, weight_decay=0.1), id="adamw"),
    ],
)


@every_optimizer
def test_every_change_leaves_what_is_remembered_of_all_others_alone_bit_for_bit(make: Make) -> None:
    network = growing(EAGER, make)
    grow_to_stage(network, "block2.pool", Stage.BLENDING)

    def check(change: Callable[[], Any], except_slot: str = "block1") -> None:
        before = optimizer_state(network, except_slot)
        assert len(before) >= 5 + 6  # convolutions, norms, head; seed
        change()
        assert same_optimizer_state(optimizer_state(network, except_slot), before)
        check_optimizer_matches(network)

    check(lambda: network.germinate("block1", "conv_light", ticks=1))
    for _ in range(3):  # through BLENDING and PROBATIONARY
        learn(network.module, network.optimizer, 1)
        check(network.end_epoch, except_slot="")
    check(lambda: network.fossilize("block1"), except_slot="")
    epoch(network)
    check(lambda: network.remove_seed("block1"))
    check(lambda: network.germinate("block1", "norm"))
    epoch(network)
    check(lambda: network.cull("block1"))


@every_optimizer
def test_a_host_whose_seeds_come_and_go_in_training_learns_bit_for_bit_as_if_alone(make: Make) -> None:
    network, lone = growing(SLOW, make), host_of("image")
    optimizer = make(lone)
    for step in range(9):
        if step in (2, 6):
            network.germinate("block1", "conv_heavy")
        if step == 4:
            network.cull("block1")
        assert learn(network.module, network.optimizer, step) == learn(lone, optimizer, step)
        network.end_epoch()
    assert same_host(network.module, lone)


@every_optimizer
def test_a_cleared_network_goes_on_as_one_that_never_grew(make: Make) -> None:
    network, fresh = growing(EAGER, make), host_of("image")
    network.germinate("block2.pool", "norm")
    grow_to_stage(network, "block1", Stage.FOSSILIZED)
    network.clear()
    assert all(slot.stage is Stage.DORMANT for slot in network.slots.values())
    assert network.measurements == {"block1": SeedMeasurements(), "block2.pool": SeedMeasurements()}
    check_optimizer_matches(network)
    network.module.load_state_dict(fresh.state_dict())
    optimizer = make(fresh)
    for step in range(3):
        assert learn(network.module, network.optimizer, step) == learn(fresh, optimizer, step)


def test_seeds_learn_under_their_own_options() -> None:
    network = growing(seed_options={"lr": 0.0, "weight_decay": 0.5})
    network.germinate("block1", "conv_light")
    before = [p.clone() for p in network.slots["block1"].seed.parameters()]
    host = network.module.head.weight.clone()
    epoch(network)
    assert all(torch.equal(a, b) for a, b in zip(before, network.slots["block1"].seed.parameters(), strict=True))
    assert not torch.equal(network.module.head.weight, host)
    group = find_group(network.optimizer, "seed.block1")
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.0, 0.5, 0)
    assert (network.optimizer.param_groups[0]["lr"], network.optimizer.param_groups[0]["weight_decay"]) == (0.05, 0)


@pytest.mark.parametrize("stage", LIFE, ids=lambda stage: stage.name)
@pytest.mark.parametrize("named", [False, True], ids=["parameters", "named parameters"])
def test_a_loaded_seed_moves_into_a_group_of_its_own_with_what_is_remembered_of_it(
    tmp_path: Path, named: bool, stage: Stage
) -> None:
    saved = growing()
    grow_to_stage(saved, "block1", stage)
    save(saved.module, tmp_path / "grown")
    load(host := host_of("image", seed=9), tmp_path / "grown")
    optimizer = Adam(host.named_parameters() if named else host.parameters(), lr=0.01)
    for step in range(3):  # has taken steps before the GrowingNetwork is created
        learn(host, optimizer, step)
    before = {id(p): [value.clone() for value in state.values()] for p, state in optimizer.state.items()}
    network = GrowingNetwork(host, optimizer, horizon=9, lifecycle=EAGER, seed_options={"lr": 0.5})
    seed = [id(p) for p in network.slots["block1"].seed.parameters()]
    assert [id(p) for p in find_group(optimizer, "seed.block1")["params"]] == seed
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]
    assert set(seed) <= set(before) == {id(p) for p in optimizer.state}
    for parameter, state in optimizer.state.items():
        assert all(torch.equal(a, b) for a, b in zip(before[id(parameter)], state.values(), strict=True))
    again = GrowingNetwork(host, optimizer, horizon=9, seed_options={"lr": 0.7})
    assert find_group(again.optimizer, "seed.block1")["lr"] == 0.5, "it has its group already"
    epoch(network)
    network.remove_seed("block1")
    check_optimizer_matches(network)


SLOTS = ["block1", "block2.pool"]


def grown(make: Make) -> GrowingNetwork:
    """Return a network with seeds in both slots, germinated last to first, so that groups and slots differ in order."""
    network = growing(LifecycleConfig(training_ticks=1, auto_cull=False), make)
    for slot, blueprint in (("block2.pool", "conv_light"), ("block1", "norm")):
        network.germinate(slot, blueprint, ticks=3)
        for step in range(2):
            epoch(network, step, dict.fromkeys(SLOTS, 2.0))
    return network


@every_optimizer
@pytest.mark.parametrize("present", [[], ["block1"], SLOTS, SLOTS[::-1]], ids=str)
def test_growth_that_was_stopped_ends_as_growth_that_was_not(make: Make, present: list[str]) -> None:
    network, file = grown(make), io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    resumed = growing(network.lifecycle, make, generator=generator_of(5))
    for slot in present:  # other seeds, or the same in another order
        resumed.germinate(slot, "conv_light")
        epoch(resumed)

    resumed.load_state_dict(torch.load(file, weights_only=True))

    assert group_names(resumed.optimizer) == group_names(network.optimizer) == ["", "seed.block2.pool", "seed.block1"]
    for step in range(3, 6):
        for each in (resumed, network):
            epoch(each, step, dict.fromkeys(SLOTS, 2.0))
    for each in (resumed, network):  # and the next seed is the same
        each.remove_seed("block1")
        each.germinate("block1", "conv_heavy")
    assert story(resumed.module) == story(network.module)
    assert resumed.measurements == network.measurements
    ours, theirs = resumed.module.state_dict(), network.module.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert same_optimizer_state(optimizer_state(resumed), optimizer_state(network))


def test_a_seed_whose_optimizer_was_replaced_can_still_be_culled() -> None:
    network = grown(lambda host: SGD(host.parameters(), lr=0.1))
    network.optimizer = AdamW(network.module.parameters(), lr=0.01)
    doomed = set(network.slots["block1"].seed.parameters())
    network.cull("block1")
    assert not doomed & {p for group in network.optimizer.param_groups for p in group["params"]}


# Every optimizer of torch.

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}

REFUSED = {
    "LBFGS": "LBFGS cannot hold parameter groups that come and go; use SGD, Adam or AdamW",
    "Muon": "Muon trains matrices alone, and seeds have other parameters; use SGD, Adam or AdamW",
    "SparseAdam": "SparseAdam takes sparse gradients alone, and those of seeds are dense; use SGD, Adam or AdamW",
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - REFUSED.keys()))
def test_seeds_come_and_go_in_a_resumed_run_and_after_a_rollback(name: str) -> None:
    def made() -> GrowingNetwork:
        return growing(EAGER, lambda host: OPTIMIZERS[name](host.parameters(), lr=0.01))  # type: ignore[call-arg]

    first = made()
    first.germinate("block1", "conv_light")
    learn(first.module, first.optimizer, 0)
    saved = deepcopy(first.state_dict())
    resumed = made()
    resumed.load_state_dict(saved)

    for step in range(2):
        resumed.germinate("block2.pool", "conv_light")
        seed = resumed.slots["block2.pool"].seed
        before = [parameter.detach().clone() for parameter in seed.parameters()]
        learn(resumed.module, resumed.optimizer, step)
        assert any(not torch.equal(*pair) for pair in zip(before, seed.parameters(), strict=True))
        resumed.cull("block1")
        learn(resumed.module, resumed.optimizer, step)
        check_optimizer_matches(resumed)
        resumed.load_state_dict(saved)
        check_optimizer_matches(resumed)


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_train_seeds_is_refused_in_one_line(name: str) -> None:
    matrices = [parameter for parameter in host_of("image").parameters() if parameter.ndim == 2]

    with pytest.raises(ValueError) as refusal:
        growing(EAGER, lambda _: OPTIMIZERS[name](matrices, lr=0.01))  # type: ignore[call-arg]

    assert str(refusal.value) == REFUSED[name]
