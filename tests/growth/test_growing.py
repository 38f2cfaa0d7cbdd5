"""Growing by hand: a network, its optimizer and its seeds stay in step, and what is refused changes nothing."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from esper_lightning.blueprints import build_seed
from esper_lightning.growth.counterfactual import contributions
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.gradients import EXPLODED, NO_GRADIENT, VANISHED, GradientStats
from esper_lightning.growth.growing import GrowingNetwork, SeedRecord
from esper_lightning.growth.manifest import manifest
from esper_lightning.growth.network import SeedEvent, count_parameters, slots_of
from esper_lightning.growth.optimizer import find_group, group_names
from esper_lightning.growth.saving import load, save
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import CALM, CPU, LAYOUTS, LIFE, STYLES, batch_of, host_of, loss_on, seeded, small_cnn, stir

Make = Callable[[nn.Module], Optimizer]

EAGER = LifecycleConfig(
    training_ticks=0, embargo_ticks=0, min_contribution=None, min_gradient_health=0.0, auto_cull=False, min_cull_age=0
)

BY_HAND = LifecycleConfig(
    training_ticks=0,
    embargo_ticks=0,
    min_contribution=None,
    min_gradient_health=0.0,
    auto_cull=False,
    auto_blend=False,
    auto_probation=False,
    min_cull_age=0,
)

every_optimizer = pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda host: SGD(host.parameters(), lr=0.05, momentum=0.9), id="sgd"),
        pytest.param(lambda host: Adam(host.parameters(), lr=0.01), id="adam"),
        pytest.param(lambda host: AdamW(host.parameters(), lr=0.01, weight_decay=0.1), id="adamw"),
    ],
)


def growing(
    lifecycle: LifecycleConfig = EAGER, make: Make = lambda host: SGD(host.parameters(), lr=0.05), **options: Any
) -> GrowingNetwork:
    """A small CNN with the slots `block1` and `block2.pool`."""
    host = host_of("image")
    return GrowingNetwork(host, make(host), horizon=50, lifecycle=lifecycle, **({"generator": seeded(1)} | options))


def learn(network: nn.Module, optimizer: Optimizer, step: int, layout: Layout = "image") -> float:
    network.train()
    optimizer.zero_grad()
    loss = loss_on(network, batch_of(layout, seed=step))
    loss.backward()
    optimizer.step()
    return loss.item()


def epoch(network: GrowingNetwork, step: int = 0, contribution: dict[str, float] | None = None) -> list[SeedEvent]:
    learn(network.module, network.optimizer, step)
    return network.tick(contribution)


def bring(network: GrowingNetwork, slot: str, stage: Stage, blueprint: str = "conv_small", **options: Any) -> None:
    """Grows a seed to `stage` by the operations of `BY_HAND`."""
    network.germinate(slot, blueprint, **({"ticks": 1} | options))
    for then in LIFE[1 : LIFE.index(stage) + 1]:
        if then in (Stage.BLENDING, Stage.PROBATIONARY):
            network.advance(slot)
        if then is Stage.FOSSILIZED:
            network.fossilize(slot)
        else:
            epoch(network, contribution={slot: 2.0})
    assert network.slots[slot].stage is stage


def told(events: list[SeedEvent]) -> list[str]:
    return [f"{event.slot}: {event.after.name}" for event in events]


def memory(network: GrowingNetwork, besides: str = "") -> dict[str, list[Tensor]]:
    """What the optimizer remembers of every parameter, by name, but for those of the seed in slot `besides`."""
    left_out = set() if not besides else set(network.slots[besides].seed.parameters())
    return {
        name: [value.clone() for value in network.optimizer.state[parameter].values() if value is not None]
        for name, parameter in network.module.named_parameters()
        if parameter not in left_out and network.optimizer.state.get(parameter)
    }


def same_memory(first: dict[str, list[Tensor]], second: dict[str, list[Tensor]]) -> bool:
    return list(first) == list(second) and all(
        torch.equal(a, b) for name in first for a, b in zip(first[name], second[name], strict=True)
    )


def check_in_step(network: GrowingNetwork) -> None:
    """The optimizer holds each parameter of the network once, and remembers nothing else."""
    held = [id(p) for group in network.optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in network.module.parameters())
    assert {id(p) for p in network.optimizer.state} <= set(held)


def test_a_seed_grown_by_hand_goes_through_its_whole_life_and_makes_the_network_better() -> None:
    host = host_of("image")
    optimizer = Adam(host.parameters(), lr=0.01)
    network = GrowingNetwork(host, optimizer, horizon=20, lifecycle=LifecycleConfig(min_contribution=None))
    batch, before = batch_of("image"), count_parameters(host)

    def right(outputs: Tensor, classes: Tensor) -> Tensor:
        return (outputs.argmax(1) == classes).double()

    assert told([network.germinate("block2.pool", "conv_light", ticks=3, style="gate", curve="cosine")]) == [
        "block2.pool: GERMINATED"
    ]
    lived, losses = [], []
    for _ in range(8):
        losses.append(learn(host, optimizer, step=7))
        lived.append(told(network.tick({name: 1.0 + c for name, c in contributions(host, [batch], right).items()})))
    assert lived == [
        ["block2.pool: TRAINING"],
        [],
        [],
        ["block2.pool: BLENDING"],
        [],
        [],
        ["block2.pool: PROBATIONARY"],
        [],
    ]
    assert network.against_fossilizing("block2.pool") == []
    kept = network.fossilize("block2.pool")
    assert (kept.blueprint, kept.before, kept.after) == ("conv_light", Stage.PROBATIONARY, Stage.FOSSILIZED)
    for _ in range(8):
        losses.append(learn(host, optimizer, step=7))
        assert network.tick() == []
    assert losses[-1] < 0.9 * losses[0]
    assert count_parameters(host) == before + (9 * 8 * 8 + 8) + (8 + 1) * 8 + 8 + 1  # 8 channels; the gate
    assert group_names(optimizer) == ["", "seed.block2.pool"]
    check_in_step(network)


def test_a_seed_that_does_not_help_is_culled_and_its_slot_opens_again() -> None:
    network = growing(LifecycleConfig(training_ticks=1, embargo_ticks=2, min_gradient_health=0.0))
    network.germinate("block1", "norm", ticks=1)
    lived = [told(epoch(network, step, {"block1": -1.0})) for step in range(8)]
    assert lived == [
        ["block1: TRAINING"],
        ["block1: BLENDING"],
        ["block1: PROBATIONARY"],
        ["block1: CULLED"],
        ["block1: EMBARGOED"],
        [],
        ["block1: DORMANT"],
        [],
    ]
    assert group_names(network.optimizer) == [""]
    check_in_step(network)
    network.germinate("block1", "conv_small")


def test_seeds_in_several_slots_live_their_own_lives() -> None:
    network = growing(LifecycleConfig(training_ticks=1, min_gradient_health=0.0, auto_cull=False))
    network.germinate("block2.pool", "norm", ticks=1)
    epoch(network)
    network.germinate("block1", "attention", ticks=1)
    lived = [told(epoch(network)) for _ in range(3)]
    assert lived == [
        ["block1: TRAINING", "block2.pool: BLENDING"],
        ["block1: BLENDING", "block2.pool: PROBATIONARY"],
        ["block1: PROBATIONARY"],
    ]


def test_where_it_is_switched_off_a_seed_advances_when_it_is_told_to() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "norm", ticks=2)
    assert [told(epoch(network)) for _ in range(4)] == [["block1: TRAINING"], [], [], []]
    assert network.against_advancing("block1") == []
    assert network.advance("block1") == SeedEvent("block1", "norm", Stage.TRAINING, Stage.BLENDING, "advance")
    assert network.against_advancing("block1") == ["alpha at 0.00 of its target, below 0.95"]
    assert [told(epoch(network)) for _ in range(4)] == [[]] * 4
    assert network.advance("block1") == SeedEvent("block1", "norm", Stage.BLENDING, Stage.PROBATIONARY, "advance")


@pytest.mark.parametrize(
    ("switch", "stuck"),
    [("auto_blend", Stage.TRAINING), ("auto_probation", Stage.BLENDING)],
    ids=lambda value: str(value),
)
def test_each_switch_stops_its_own_advance_alone(switch: str, stuck: Stage) -> None:
    network = growing(LifecycleConfig(training_ticks=0, min_gradient_health=0.0, auto_cull=False, **{switch: False}))
    network.germinate("block1", "norm", ticks=1)
    for _ in range(5):
        epoch(network)
    assert network.slots["block1"].stage is stuck
    network.advance("block1")
    for _ in range(2):
        epoch(network)
    assert network.slots["block1"].stage is Stage.PROBATIONARY


def check_refused(network: GrowingNetwork, attempt: Callable[[], Any], message: str) -> None:
    story, remembered, records = manifest(network.module), memory(network), deepcopy(network.records)
    weights = {name: value.clone() for name, value in network.module.state_dict().items()}
    held = [id(p) for group in network.optimizer.param_groups for p in group["params"]]
    with pytest.raises(ValueError) as refusal:
        attempt()
    assert str(refusal.value) == message
    assert manifest(network.module) == story
    assert network.records == records
    assert same_memory(memory(network), remembered)
    assert [id(p) for group in network.optimizer.param_groups for p in group["params"]] == held
    assert all(torch.equal(weights[name], value) for name, value in network.module.state_dict().items())


@pytest.mark.parametrize("stage", [Stage.DORMANT, *LIFE], ids=lambda stage: stage.name)
def test_every_refusal_names_the_slot_and_the_reasons_and_changes_nothing(stage: Stage) -> None:
    network = growing(BY_HAND)
    if stage is not Stage.DORMANT:
        bring(network, "block1", stage)
    follow = {
        Stage.DORMANT: "GERMINATED",
        Stage.GERMINATED: "TRAINING, CULLED",
        Stage.TRAINING: "BLENDING, CULLED",
        Stage.BLENDING: "PROBATIONARY, CULLED",
        Stage.PROBATIONARY: "FOSSILIZED, CULLED",
        Stage.FOSSILIZED: "nothing (final)",
    }[stage]
    if stage is not Stage.DORMANT:
        message = f"slot 'block1': {stage.name} cannot become GERMINATED; allowed: {follow}"
        check_refused(network, lambda: network.germinate("block1", "norm"), message)
    if stage not in (Stage.TRAINING, Stage.BLENDING):
        message = f"slot 'block1' cannot be advanced: nothing to advance in {stage.name}"
        check_refused(network, lambda: network.advance("block1"), message)
    if stage not in (Stage.BLENDING, Stage.PROBATIONARY):
        message = f"slot 'block1': alpha does not move in {stage.name}; only BLENDING to PROBATIONARY"
        check_refused(network, lambda: network.set_alpha("block1", 0.5), message)
    if stage is not Stage.PROBATIONARY:
        message = f"slot 'block1' cannot be fossilized: {stage.name} is not PROBATIONARY"
        check_refused(network, lambda: network.fossilize("block1"), message)
    if stage in (Stage.DORMANT, Stage.FOSSILIZED):
        for ticks in (0, 1, 3):
            message = f"slot 'block1' cannot be culled: no live seed in {stage.name}"
            check_refused(network, lambda ticks=ticks: network.cull("block1", ticks=ticks), message)


def test_gates_refuse_with_all_their_reasons() -> None:
    network = growing(
        LifecycleConfig(training_ticks=3, min_cull_age=5, min_gradient_health=1.0, auto_blend=False, auto_cull=False)
    )
    network.germinate("block1", "norm", ticks=4)
    network.tick(gradients={"block1": CALM._replace(vanished=0.5), "block2.pool": NO_GRADIENT})
    unhealthy = "gradient health 0.75 below 1"
    check_refused(
        network,
        lambda: network.advance("block1"),
        f"slot 'block1' cannot be advanced: {unhealthy}; 0 of 3 ticks in TRAINING",
    )
    check_refused(
        network, lambda: network.cull("block1"), "slot 'block1' cannot be culled: 1 ticks old, younger than 5"
    )
    network.slots["block1"].move_to(Stage.BLENDING)
    check_refused(
        network,
        lambda: network.advance("block1"),
        "slot 'block1' cannot be advanced: alpha at 0.00 of its target, below 0.95",
    )
    network.slots["block1"].move_to(Stage.PROBATIONARY)
    check_refused(
        network,
        lambda: network.fossilize("block1"),
        f"slot 'block1' cannot be fossilized: {unhealthy}; alpha is still moving; contribution not measured",
    )


@pytest.mark.parametrize(
    "attempt",
    [
        lambda network: network.germinate("blok1", "norm"),
        lambda network: network.advance("blok1"),
        lambda network: network.set_alpha("blok1", 0.5),
        lambda network: network.fossilize("blok1"),
        lambda network: network.cull("blok1"),
        lambda network: network.remove("blok1"),
        lambda network: network.evidence("blok1"),
        lambda network: network.against_advancing("blok1"),
        lambda network: network.against_fossilizing("blok1"),
        lambda network: network.against_culling("blok1"),
    ],
)
def test_a_mistyped_slot_is_named_with_the_one_that_was_meant(attempt: Callable[[GrowingNetwork], Any]) -> None:
    network = growing()
    network.germinate("block1", "norm")
    check_refused(network, lambda: attempt(network), "unknown slot 'blok1'; did you mean 'block1'?")


def test_a_blueprint_that_does_not_fit_is_refused() -> None:
    network = growing()
    check_refused(
        network,
        lambda: network.germinate("block1", "conv_lite"),
        "unknown blueprint 'conv_lite'; did you mean 'conv_light'?",
    )
    with pytest.raises(ValueError, match="blueprint 'mlp' does not grow on image features; these do: norm, "):
        network.germinate("block1", "mlp")
    assert network.slots["block1"].stage is Stage.DORMANT


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"style": "sum"}, "unknown style 'sum'; there are: add, multiply, gate"),
        ({"style": "multipy"}, "unknown style 'multipy'; did you mean 'multiply'?"),
        ({"curve": "cosin"}, "unknown curve 'cosin'; did you mean 'cosine'?"),
        ({"ticks": -1}, "a ramp takes a whole number of ticks, at least 0, got -1"),
        ({"ticks": 2.5}, "a ramp takes a whole number of ticks, at least 0, got 2.5"),
        ({"ticks": True}, "a ramp takes a whole number of ticks, at least 0, got True"),
    ],
    ids=str,
)
def test_a_way_of_growing_that_does_not_exist_is_refused_at_once(wrong: dict[str, Any], message: str) -> None:
    network = growing()
    before = network.generator.get_state()
    check_refused(network, lambda: network.germinate("block1", "norm", **wrong), message)
    assert network.slots["block1"].stage is Stage.DORMANT
    assert torch.equal(network.generator.get_state(), before)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"curve": "parabola"}, "unknown curve 'parabola'; there are: linear, cosine, sigmoid6, sigmoid12, sigmoid24"),
        ({"ticks": -1}, "a ramp takes a whole number of ticks, at least 0, got -1"),
    ],
    ids=str,
)
def test_a_way_for_alpha_that_does_not_exist_is_refused_and_changes_nothing(
    wrong: dict[str, Any], message: str
) -> None:
    network = growing(BY_HAND)
    bring(network, "block1", Stage.BLENDING)
    check_refused(network, lambda: network.set_alpha("block1", 0.5, **wrong), message)
    if "curve" in wrong:
        check_refused(network, lambda: network.cull("block1", ticks=3, **wrong), message)


def test_options_of_seeds_that_the_optimizer_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^seed_options: the optimizer has no 'wieght_decay'; did you mean 'weight_d"):
        growing(seed_options={"lr": 0.1, "wieght_decay": 0.5})
    with pytest.raises(ValueError, match=r"^seed_options: the optimizer has no 'betas'; there are: lr, momentum, "):
        growing(seed_options={"betas": (0.9, 0.9)})
    assert growing(make=lambda host: Adam(host.parameters()), seed_options={"betas": (0.9, 0.9)})


def test_a_network_without_slots_is_refused_with_the_way_out() -> None:
    host = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"the network has no slots; give it some with attach_slots"):
        GrowingNetwork(host, SGD(host.parameters(), lr=0.1), horizon=5)


@every_optimizer
def test_every_change_leaves_what_is_remembered_of_all_others_alone_bit_for_bit(make: Make) -> None:
    network = growing(BY_HAND, make)
    bring(network, "block2.pool", Stage.BLENDING, style="gate")

    def check(change: Callable[[], Any]) -> None:
        before = memory(network, besides="block1")
        assert len(before) >= 5 + 6  # convolutions, norms, head; seed and gate
        change()
        assert same_memory(memory(network, besides="block1"), before)
        check_in_step(network)

    check(lambda: network.germinate("block1", "conv_light", ticks=1, style="gate"))
    epoch(network)
    check(lambda: network.advance("block1"))
    epoch(network)
    check(lambda: network.advance("block1"))
    check(lambda: network.set_alpha("block1", 0.5, ticks=1))
    epoch(network, contribution={"block1": 1.0})
    check(lambda: network.fossilize("block1"))
    epoch(network)
    check(lambda: network.remove("block1"))
    check(lambda: network.germinate("block1", "norm"))
    epoch(network)
    check(lambda: network.cull("block1"))
    network.tick()
    check(lambda: network.germinate("block1", "norm", ticks=1))
    epoch(network)
    network.advance("block1")
    epoch(network)
    check(lambda: network.cull("block1", ticks=2))
    check(network.tick)  # faded out
    assert not network.slots["block1"].occupied


def test_what_happens_by_itself_leaves_all_memory_alone_too() -> None:
    network = growing(EAGER, lambda host: Adam(host.parameters(), lr=0.01))
    network.germinate("block1", "conv_light", ticks=1)
    stages = []
    for step in range(3):
        learn(network.module, network.optimizer, step)
        before = memory(network)
        network.tick()
        stages.append(network.slots["block1"].stage)
        assert same_memory(memory(network), before)
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
        network.tick()
    grown = network.module.state_dict()
    assert all(torch.equal(grown[name], value) for name, value in lone.state_dict().items())


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
        network.tick()
        grown = network.module.state_dict()
        assert all(torch.equal(grown[name], value) for name, value in lone.state_dict().items()), step


def forgotten(network: GrowingNetwork) -> bool:
    return not any(value.any() for values in memory(network).values() for value in values)


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
    assert len(memory(network)) >= 5


def test_without_carry_over_removing_resets_all_of_it_too() -> None:
    network = growing(BY_HAND, lambda host: Adam(host.parameters()), carry_over=False)
    network.germinate("block1", "norm")
    epoch(network)
    network.remove("block2.pool")  # nothing is there, so nothing changes
    assert not forgotten(network)
    network.remove("block1")
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
        lived.append((*told(network.tick({"block1": -1.0})), forgotten(network)))
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
    bring(network, "block1", Stage.FOSSILIZED)
    network.clear()
    assert all(slot.stage is Stage.DORMANT for slot in network.slots.values())
    assert network.records == {"block1": SeedRecord(), "block2.pool": SeedRecord()}
    check_in_step(network)
    network.module.load_state_dict(fresh.state_dict())
    optimizer = make(fresh)
    for step in range(3):
        assert learn(network.module, network.optimizer, step) == learn(fresh, optimizer, step)


@pytest.mark.parametrize("stage", LIFE, ids=lambda stage: stage.name)
def test_whatever_grows_can_be_removed_and_the_slot_is_open_at_once(stage: Stage) -> None:
    network = growing(BY_HAND)
    bring(network, "block1", stage)
    network.remove("block1")
    assert network.slots["block1"].stage is Stage.DORMANT
    assert network.records["block1"] == SeedRecord()
    check_in_step(network)
    network.germinate("block1", "norm")


def test_removing_from_an_empty_slot_opens_it_and_does_nothing_else() -> None:
    network = growing(LifecycleConfig(min_cull_age=0))
    network.remove("block1")
    network.germinate("block1", "norm")
    network.cull("block1")
    network.remove("block1")  # before its embargo is over
    assert network.germinate("block1", "norm").after is Stage.GERMINATED
    check_in_step(network)


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
    check_in_step(network)


def test_an_optimizer_that_knows_parameters_by_name_may_grow() -> None:
    host = host_of("image")
    network = GrowingNetwork(host, SGD(host.named_parameters(), lr=0.1), horizon=9, lifecycle=BY_HAND)
    network.germinate("block1", "conv_small")
    epoch(network)
    names = [name for name, _ in network.slots["block1"].seed.named_parameters()]
    group = find_group(network.optimizer, "seed.block1")
    assert group["param_names"] == [f"seed.block1.{name}" for name in names]
    check_in_step(network)
    network.cull("block1")
    epoch(network)
    check_in_step(network)


def loaded(tmp_path: Path, stage: Stage = Stage.TRAINING) -> nn.Module:
    """A new host with what `save` wrote of a network that grew."""
    before = growing(BY_HAND)
    bring(before, "block1", stage)
    save(before.module, tmp_path)
    host = host_of("image", seed=9)
    load(host, tmp_path)
    return host


def test_a_network_that_was_loaded_grows_on(tmp_path: Path) -> None:
    host = loaded(tmp_path)
    network = GrowingNetwork(host, SGD(host.parameters(), lr=0.1), horizon=9, lifecycle=EAGER)
    assert told(epoch(network)) == ["block1: BLENDING"]
    network.cull("block1")
    check_in_step(network)


@pytest.mark.parametrize("stage", LIFE, ids=lambda stage: stage.name)
@pytest.mark.parametrize("named", [False, True], ids=["parameters", "named parameters"])
def test_a_loaded_seed_moves_into_a_group_of_its_own_with_what_is_remembered_of_it(
    tmp_path: Path, named: bool, stage: Stage
) -> None:
    host = loaded(tmp_path, stage)
    optimizer = Adam(host.named_parameters() if named else host.parameters(), lr=0.01)
    for step in range(3):  # has trained before it is given to a GrowingNetwork
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
    check_in_step(network)
    epoch(network)
    network.remove("block1")
    check_in_step(network)
    assert not set(seed) & {id(p) for p in optimizer.state}


def test_a_seed_that_has_its_group_already_stays_in_it() -> None:
    first = growing(BY_HAND, seed_options={"lr": 0.3})
    first.germinate("block1", "norm")
    again = GrowingNetwork(first.module, first.optimizer, horizon=9, seed_options={"lr": 0.7})
    assert group_names(again.optimizer) == ["", "seed.block1"]
    assert find_group(again.optimizer, "seed.block1")["lr"] == 0.3
    check_in_step(again)


def test_a_tensor_as_statistics_agrees_with_numpy_in_double_precision() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "conv_heavy", style="gate")
    stir(network.slots["block1"].seed)
    loss_on(network.module, batch_of("image")).backward()
    named = list(network.module.named_parameters())
    expected = []
    for of in (lambda name: ".seed." not in name, lambda name: ".block1.seed." in name, lambda name: False):
        gradients = [p.grad.numpy().astype(np.float64) for name, p in named if of(name)]
        norms = np.array([np.sqrt((gradient**2).sum()) for gradient in gradients])
        numbers = sum(gradient.size for gradient in gradients)
        total = np.sqrt((norms**2).sum())
        expected.append(
            [total, total / np.sqrt(numbers), (norms < VANISHED).mean(), (norms > EXPLODED).mean()]
            if numbers
            else [0] * 4
        )
    measured = network.gradient_tensors()
    assert measured.shape == (3, 4)
    np.testing.assert_allclose(measured.numpy(), expected, rtol=1e-5)
    assert measured[2].tolist() == list(NO_GRADIENT)
    assert network.gradients() == {"block1": GradientStats(*measured[1].tolist())}  # an empty slot has none


def test_only_seeds_with_a_gradient_at_hand_are_named() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "norm")
    assert network.gradients() == {}
    loss_on(network.module, batch_of("image")).backward()
    network.germinate("block2.pool", "norm")  # after the backward pass
    assert list(network.gradients()) == ["block1"]
    network.tick()
    assert network.evidence("block2.pool").gradient is None
    network.optimizer.zero_grad()
    network.tick()
    assert network.evidence("block1").gradient is None  # that of the epoch before says nothing of this one


def test_what_is_frozen_does_not_count_among_what_should_learn() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "conv_light")
    stir(network.slots["block1"].seed)
    weight, bias = network.slots["block1"].seed.parameters()
    loss_on(network.module, batch_of("image")).backward()
    whole = network.gradients()["block1"]
    bias.grad, bias.requires_grad = None, False
    part = network.gradients()["block1"]
    assert part.vanished == whole.vanished == 0.0
    assert part.norm == pytest.approx(weight.grad.double().norm().item(), rel=1e-5)
    assert part.rms == pytest.approx(weight.grad.double().square().mean().sqrt().item(), rel=1e-5)
    assert part.norm < whole.norm


def test_gradients_are_measured_at_each_tick_unless_they_are_given() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "conv_light")
    epoch(network)
    assert network.records["block1"].gradient == network.gradients()["block1"]
    assert network.records["block2.pool"].gradient is None
    network.tick(gradients={"block1": CALM, "block2.pool": NO_GRADIENT})
    assert network.records["block1"].gradient == CALM
    assert network.evidence("block1").gradient == CALM


def test_a_seed_that_is_missing_among_the_gradients_counts_as_not_measured() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "norm")
    network.germinate("block2.pool", "norm")
    network.tick(gradients={"block1": CALM, "block2.pool": CALM})
    network.tick(gradients={"block1": CALM})
    assert [network.records[name].gradient for name in network.slots] == [CALM, None]
    assert network.against_advancing("block1") == []
    assert network.against_advancing("block2.pool") == ["gradient not measured"]


@pytest.mark.parametrize(
    "measured",
    [
        {"contributions": {"block1": 1.0, "blok1": 1.0}},
        {"gradients": {"block1": CALM, "blok1": CALM}},
        {"contributions": {"block1": 1.0}, "gradients": {"block1": CALM, "blok1": CALM}},
    ],
    ids=str,
)
def test_a_measurement_of_a_mistyped_slot_is_refused_before_any_time_passes(measured: dict[str, Any]) -> None:
    network = growing(BY_HAND)
    bring(network, "block1", Stage.BLENDING)
    check_refused(network, lambda: network.tick(**measured), "unknown slot 'blok1'; did you mean 'block1'?")


def test_contributions_are_kept_of_blended_seeds_and_the_one_before_as_well() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "norm", ticks=1)
    epoch(network, contribution={"block1": 9.0})
    assert network.records["block1"].contribution is None  # a seed in TRAINING contributes nothing
    network.advance("block1")
    for value in (1.0, 2.0, None):
        epoch(network, contribution=None if value is None else {"block1": value})
    record = network.records["block1"]
    assert (record.contribution, record.previous_contribution) == (2.0, 1.0)
    assert network.evidence("block1").contribution == 2.0
    network.cull("block1")
    assert network.records["block1"] == SeedRecord()


def test_a_new_seed_is_judged_by_nothing_that_the_one_before_showed() -> None:
    network = growing(BY_HAND)
    bring(network, "block1", Stage.PROBATIONARY)
    network.cull("block1")
    network.tick()
    network.germinate("block1", "norm")
    evidence = network.evidence("block1")
    assert (evidence.age, evidence.ticks_in_stage, evidence.gradient, evidence.contribution) == (0, 0, None, None)
    assert evidence.in_optimizer


def seed_weights(network: GrowingNetwork, slot: str = "block1") -> list[Tensor]:
    network.germinate(slot, "conv_heavy", style="gate")
    return [p.detach().clone() for p in network.slots[slot].seed.parameters()]


def test_by_default_seeds_follow_torchs_seed_and_leave_its_generator_alone() -> None:
    weights = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        torch.rand(seed)  # whatever was drawn since
        before = torch.get_rng_state()
        weights.append(seed_weights(growing(generator=None)))
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not torch.equal(weights[0][0], weights[2][0])


def test_by_default_a_negative_seed_will_do() -> None:
    torch.manual_seed(-1)
    assert seed_weights(growing(generator=None))
    torch.manual_seed(0)


def test_by_default_a_seed_does_not_repeat_the_hosts_first_weights() -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 12), SeedSlot("end", "vector", 12))
    network = GrowingNetwork(host, SGD(host.parameters(), lr=0.1), horizon=3)
    network.germinate("end", "mlp_small")  # it begins with a Linear(12, 24) too
    assert not torch.equal(network.slots["end"].seed.body[0].weight, host[0].weight)


def test_seeds_come_from_the_generator_that_was_given() -> None:
    network = growing(generator=seeded(11))
    network.germinate("block1", "conv_heavy")
    expected = build_seed("conv_heavy", "image", 4, CPU, seeded(11))
    assert all(
        torch.equal(a, b) for a, b in zip(network.slots["block1"].seed.parameters(), expected.parameters(), strict=True)
    )


@pytest.mark.parametrize("birth", ["identity", "random"])
def test_seeds_are_born_as_the_lifecycle_says(birth: str) -> None:
    network = growing(LifecycleConfig(birth=birth))
    network.germinate("block1", "conv_heavy")
    x = torch.randn(2, 4, 8, 8, generator=seeded(2))
    assert torch.equal(network.slots["block1"].seed(x), x) is (birth == "identity")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_grows_by_hand(layout: Layout, style: str) -> None:
    host = host_of(layout)
    optimizer = Adam(host.parameters(), lr=0.01)
    network = GrowingNetwork(host, optimizer, horizon=9, lifecycle=EAGER)
    slot = next(iter(slots_of(host)))
    network.germinate(slot, "norm", ticks=2, style=style, curve="sigmoid6")
    for step in range(4):
        learn(host, optimizer, step, layout)
        network.tick({slot: 1.0})
    assert network.fossilize(slot).after is Stage.FOSSILIZED
    check_in_step(network)


def test_a_target_of_the_lifecycle_is_where_alpha_rises_to() -> None:
    network = growing(LifecycleConfig(training_ticks=0, alpha_target=0.6, min_gradient_health=0.0, auto_cull=False))
    network.germinate("block1", "norm", ticks=3)
    alphas = []
    for _ in range(6):
        epoch(network)
        alphas.append(network.slots["block1"].alpha.item())
    assert alphas == pytest.approx([0.2, 0.4, 0.6, 0.6, 0.6, 0.6])


def test_a_ramp_without_ticks_is_all_there_at_once() -> None:
    network = growing(EAGER)
    network.germinate("block1", "norm", ticks=0)
    assert told(epoch(network)) == ["block1: TRAINING", "block1: BLENDING"]
    assert network.slots["block1"].alpha.item() == 1.0
    assert told(epoch(network)) == ["block1: PROBATIONARY"]


def test_probation_times_out_by_the_networks_horizon() -> None:
    def ticks_on_probation(horizon: int) -> int:
        host = small_cnn(["block1"])
        config = LifecycleConfig(training_ticks=0)
        network = GrowingNetwork(host, SGD(host.parameters(), lr=0.1), horizon=horizon, lifecycle=config)
        network.germinate("block1", "norm", ticks=0)
        ticks = 0
        while network.slots["block1"].occupied:
            ticks += network.slots["block1"].stage is Stage.PROBATIONARY
            network.tick({"block1": 0.5}, {"block1": CALM})
        return ticks

    assert [ticks_on_probation(horizon) for horizon in (10, 50, 200)] == [5, 5, 20]
