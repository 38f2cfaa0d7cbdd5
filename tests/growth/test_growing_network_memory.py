"""Optimizer state of a network whose seeds are added and removed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from esper_lightning.growth.export import load, save
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.growing_network import GrowingNetwork, SeedMeasurements
from esper_lightning.growth.param_groups import find_group, group_names
from esper_lightning.growth.stages import Stage
from tests.growth.by_hand import (
    BY_HAND,
    EAGER,
    Make,
    check_optimizer_matches,
    describe_events,
    epoch,
    grow_to_stage,
    growing,
    learn,
    optimizer_state,
    same_optimizer_state,
)
from tests.growth.grown import LIFE, host_of, same_host

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
    network = growing(BY_HAND, make)
    grow_to_stage(network, "block2.pool", Stage.BLENDING, style="gate")

    def check(change: Callable[[], Any]) -> None:
        before = optimizer_state(network, except_slot="block1")
        assert len(before) >= 5 + 6  # convolutions, norms, head; seed and gate
        change()
        assert same_optimizer_state(optimizer_state(network, except_slot="block1"), before)
        check_optimizer_matches(network)

    check(lambda: network.germinate("block1", "conv_light", ticks=1, style="gate"))
    epoch(network)
    check(lambda: network.advance("block1"))
    epoch(network)
    check(lambda: network.advance("block1"))
    check(lambda: network.set_alpha("block1", 0.5, ticks=1))
    epoch(network, contribution={"block1": 1.0})
    check(lambda: network.fossilize("block1"))
    epoch(network)
    check(lambda: network.remove_seed("block1"))
    check(lambda: network.germinate("block1", "norm"))
    epoch(network)
    check(lambda: network.cull("block1"))
    network.end_epoch()
    check(lambda: network.germinate("block1", "norm", ticks=1))
    epoch(network)
    network.advance("block1")
    epoch(network)
    check(lambda: network.cull("block1", ticks=2))
    check(network.end_epoch)  # faded out
    assert not network.slots["block1"].occupied


def test_what_happens_by_itself_leaves_all_memory_alone_too() -> None:
    network = growing(EAGER, lambda host: Adam(host.parameters(), lr=0.01))
    network.germinate("block1", "conv_light", ticks=1)
    stages = []
    for step in range(3):
        learn(network.module, network.optimizer, step)
        before = optimizer_state(network)
        network.end_epoch()
        stages.append(network.slots["block1"].stage)
        assert same_optimizer_state(optimizer_state(network), before)
    assert stages == [Stage.BLENDING, Stage.PROBATIONARY, Stage.PROBATIONARY]


@every_optimizer
def test_a_host_whose_seeds_come_and_go_in_training_learns_bit_for_bit_as_if_alone(make: Make) -> None:
    network, lone = growing(BY_HAND, make), host_of("image")
    optimizer = make(lone)
    for step in range(9):
        if step in (2, 6):
            network.germinate("block1", "conv_heavy", style="multiply")
        if step == 4:
            network.cull("block1")
        losses = learn(network.module, network.optimizer, step), learn(lone, optimizer, step)
        assert losses[0] == losses[1]
        network.end_epoch()
    assert same_host(network.module, lone)


@every_optimizer
def test_without_carry_over_a_host_goes_on_as_with_a_new_optimizer_at_each_change(make: Make) -> None:
    network, lone = growing(BY_HAND, make, carry_over=False), host_of("image")
    optimizer = make(lone)
    for step in range(9):
        if step in (2, 6):
            network.germinate("block1", "conv_heavy")
            optimizer = make(lone)
        if step == 4:
            network.cull("block1")
            optimizer = make(lone)
        learn(network.module, network.optimizer, step)
        learn(lone, optimizer, step)
        network.end_epoch()
        assert same_host(network.module, lone), step


def forgotten(network: GrowingNetwork) -> bool:
    return not any(value.any() for values in optimizer_state(network).values() for value in values)


@every_optimizer
def test_without_carry_over_every_change_resets_all_of_it(make: Make) -> None:
    network = growing(BY_HAND, make, carry_over=False)

    def check(change: Callable[[], Any]) -> None:
        epoch(network, contribution={"block1": 1.0})
        assert not forgotten(network)
        change()
        assert forgotten(network)

    check(lambda: network.germinate("block1", "conv_light", ticks=1))
    epoch(network)
    check(lambda: network.advance("block1"))
    check(lambda: network.advance("block1"))
    check(lambda: network.fossilize("block1"))
    check(network.clear)
    check(lambda: network.germinate("block1", "norm"))
    check(lambda: network.cull("block1"))
    assert len(optimizer_state(network)) >= 5


def test_without_carry_over_removing_resets_all_of_it_too() -> None:
    network = growing(BY_HAND, lambda host: Adam(host.parameters()), carry_over=False)
    network.germinate("block1", "norm")
    epoch(network)
    network.remove_seed("block2.pool")  # nothing to remove, so nothing changes
    assert not forgotten(network)
    network.remove_seed("block1")
    assert forgotten(network)


def test_without_carry_over_what_happens_by_itself_resets_too_but_time_does_not() -> None:
    network = growing(
        LifecycleConfig(training_ticks=1, min_gradient_health=0.0, embargo_ticks=1),
        lambda host: Adam(host.parameters()),
        carry_over=False,
    )
    network.germinate("block1", "norm", ticks=1)
    lived = []
    for step in range(7):
        learn(network.module, network.optimizer, step)
        lived.append((*describe_events(network.end_epoch({"block1": -1.0})), forgotten(network)))
    assert lived == [
        ("block1: TRAINING", False),
        ("block1: BLENDING", True),
        ("block1: PROBATIONARY", True),
        ("block1: CULLED", True),
        ("block1: EMBARGOED", False),
        ("block1: DORMANT", False),
        (False,),
    ]


@every_optimizer
def test_a_cleared_network_goes_on_as_one_that_never_grew(make: Make) -> None:
    network, fresh = growing(BY_HAND, make), host_of("image")
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


@pytest.mark.parametrize("stage", LIFE, ids=lambda stage: stage.name)
def test_whatever_grows_can_be_removed_and_the_slot_is_open_at_once(stage: Stage) -> None:
    network = growing(BY_HAND)
    grow_to_stage(network, "block1", stage)
    network.remove_seed("block1")
    assert network.slots["block1"].stage is Stage.DORMANT
    assert network.measurements["block1"] == SeedMeasurements()
    check_optimizer_matches(network)
    network.germinate("block1", "norm")


def test_removing_from_an_empty_slot_opens_it_and_does_nothing_else() -> None:
    network = growing(LifecycleConfig(min_cull_age=0))
    network.remove_seed("block1")
    network.germinate("block1", "norm")
    network.cull("block1")
    network.remove_seed("block1")  # before its embargo is over
    assert network.germinate("block1", "norm").after is Stage.GERMINATED
    check_optimizer_matches(network)


def test_seeds_learn_under_their_own_options() -> None:
    network = growing(BY_HAND, seed_options={"lr": 0.0, "weight_decay": 0.5})
    network.germinate("block1", "conv_light", style="gate")
    before = [p.clone() for p in network.slots["block1"].seed.parameters()]
    host = network.module.head.weight.clone()
    epoch(network)
    assert all(torch.equal(a, b) for a, b in zip(before, network.slots["block1"].seed.parameters(), strict=True))
    assert not torch.equal(network.module.head.weight, host)
    group = find_group(network.optimizer, "seed.block1")
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.0, 0.5, 0)
    assert (network.optimizer.param_groups[0]["lr"], network.optimizer.param_groups[0]["weight_decay"]) == (0.05, 0)


def test_an_optimizer_with_groups_of_its_own_that_have_no_names_keeps_them() -> None:
    host = host_of("image")
    head = list(host.head.parameters())
    body = [p for p in host.parameters() if not any(p is q for q in head)]
    optimizer = SGD([{"params": body}, {"params": head, "lr": 0.3}], lr=0.1, momentum=0.9)
    network = GrowingNetwork(host, optimizer, horizon=9, lifecycle=BY_HAND)
    network.germinate("block1", "norm")
    network.germinate("block2.pool", "norm")
    epoch(network)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3, 0.1, 0.1]
    network.cull("block1")
    assert group_names(optimizer) == ["", "", "seed.block2.pool"]
    epoch(network)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3, 0.1]
    check_optimizer_matches(network)


def test_an_optimizer_that_knows_parameters_by_name_may_grow() -> None:
    host = host_of("image")
    network = GrowingNetwork(host, SGD(host.named_parameters(), lr=0.1), horizon=9, lifecycle=BY_HAND)
    network.germinate("block1", "conv_small")
    epoch(network)
    names = [name for name, _ in network.slots["block1"].seed.named_parameters()]
    group = find_group(network.optimizer, "seed.block1")
    assert group["param_names"] == [f"seed.block1.{name}" for name in names]
    check_optimizer_matches(network)
    network.cull("block1")
    epoch(network)
    check_optimizer_matches(network)


def loaded(tmp_path: Path, stage: Stage = Stage.TRAINING) -> nn.Module:
    """Return a new host loaded from the file that `save` wrote."""
    before = growing(BY_HAND)
    grow_to_stage(before, "block1", stage)
    save(before.module, tmp_path / "grown")
    host = host_of("image", seed=9)
    load(host, tmp_path / "grown")
    return host


def test_a_network_that_was_loaded_grows_on(tmp_path: Path) -> None:
    host = loaded(tmp_path)
    network = GrowingNetwork(host, SGD(host.parameters(), lr=0.1), horizon=9, lifecycle=EAGER)
    assert describe_events(epoch(network)) == ["block1: BLENDING"]
    network.cull("block1")
    check_optimizer_matches(network)


@pytest.mark.parametrize("stage", LIFE, ids=lambda stage: stage.name)
@pytest.mark.parametrize("named", [False, True], ids=["parameters", "named parameters"])
def test_a_loaded_seed_moves_into_a_group_of_its_own_with_what_is_remembered_of_it(
    tmp_path: Path, named: bool, stage: Stage
) -> None:
    host = loaded(tmp_path, stage)
    optimizer = Adam(host.named_parameters() if named else host.parameters(), lr=0.01)
    for step in range(3):  # has taken steps before the GrowingNetwork is created
        learn(host, optimizer, step)
    before = {id(p): [value.clone() for value in state.values()] for p, state in optimizer.state.items()}
    network = GrowingNetwork(host, optimizer, horizon=9, lifecycle=BY_HAND, seed_options={"lr": 0.5})
    seed = [id(p) for p in network.slots["block1"].seed.parameters()]
    assert group_names(optimizer) == ["", "seed.block1"]
    assert [id(p) for p in find_group(optimizer, "seed.block1")["params"]] == seed
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]
    assert set(seed) <= set(before)
    assert before.keys() == {id(p) for p in optimizer.state}
    for parameter, state in optimizer.state.items():
        assert all(torch.equal(a, b) for a, b in zip(before[id(parameter)], state.values(), strict=True))
    check_optimizer_matches(network)
    epoch(network)
    network.remove_seed("block1")
    check_optimizer_matches(network)
    assert not set(seed) & {id(p) for p in optimizer.state}


def test_a_seed_that_has_its_group_already_stays_in_it() -> None:
    first = growing(BY_HAND, seed_options={"lr": 0.3})
    first.germinate("block1", "norm")
    again = GrowingNetwork(first.module, first.optimizer, horizon=9, seed_options={"lr": 0.7})
    assert group_names(again.optimizer) == ["", "seed.block1"]
    assert find_group(again.optimizer, "seed.block1")["lr"] == 0.3
    check_optimizer_matches(again)
