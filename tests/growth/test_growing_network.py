"""Growth by operations: lives of seeds, what is measured and refused, and the optimizer's state in all of it."""

import io
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from esper_lightning.growth.blueprints import build_seed
from esper_lightning.growth.counterfactual import contributions
from esper_lightning.growth.export import load, save
from esper_lightning.growth.gates import NO_GRADIENT, LifecycleConfig
from esper_lightning.growth.growing_network import GrowingNetwork, SeedMeasurements
from esper_lightning.growth.lifecycle import SeedEvent, count_parameters
from esper_lightning.growth.param_groups import find_group, group_names
from esper_lightning.growth.stages import Stage
from tests.growth.by_hand import (
    EAGER,
    Make,
    check_optimizer_matches,
    check_refused,
    epoch,
    grow_to_stage,
    growing,
    learn,
    optimizer_state,
    same_optimizer_state,
)
from tests.growth.grown import CALM, CPU, LIFE, batch_of, generator_of, host_of, loss_on, same_host, small_cnn, story

# Lives.


def test_a_seed_goes_through_its_whole_life_and_makes_the_network_better() -> None:
    host = host_of("image")
    optimizer = Adam(host.parameters(), lr=0.01)
    lifecycle = LifecycleConfig(training_ticks=3, min_contribution=None)
    network = GrowingNetwork(host, optimizer, horizon=20, lifecycle=lifecycle)
    batch, before = batch_of("image"), count_parameters(host)

    def right(outputs: Tensor, classes: Tensor) -> Tensor:
        return (outputs.argmax(1) == classes).double()

    born = network.germinate("block2.pool", "conv_light", ticks=3, curve="sigmoid12")
    assert str(born) == "block2.pool: conv_light DORMANT → GERMINATED (germinate)"
    lived, losses = [], []
    for _ in range(8):
        losses.append(learn(host, optimizer, step=7))
        # Sixteen samples measure a contribution to 6 points, and its sign depends on the processor's rounding.
        measured = contributions(host, [batch], right)
        lived.append([f"{e.after.name}: {e.cause}" for e in network.end_epoch(dict.fromkeys(measured, 1.0))])
    blending, probation = ["BLENDING: ready to blend"], ["PROBATIONARY: alpha reached its target"]
    assert lived == [["TRAINING: placed"], [], [], blending, [], [], probation, []]
    assert network.reasons_against_fossilizing("block2.pool") == []
    kept = network.fossilize("block2.pool")
    stages = (Stage.PROBATIONARY, Stage.FOSSILIZED)
    assert kept == SeedEvent("block2.pool", "conv_light", *stages, "fossilize", age=8, contribution=1.0)
    for _ in range(8):
        losses.append(learn(host, optimizer, step=7))
        assert network.end_epoch() == []
    assert losses[-1] < 0.9 * losses[0]
    assert count_parameters(host) == before + 9 * 8 * 8 + 8  # 8 channels
    check_optimizer_matches(network)


def test_a_seed_may_be_blended_from_the_start_without_any_gate() -> None:
    network = growing(LifecycleConfig(training_ticks=9))
    event = network.germinate("block1", "conv_light", ticks=2, stage="BLENDING")
    assert (event.before, event.after) == (Stage.DORMANT, Stage.BLENDING)
    assert network.slots["block1"].alpha.item() == 0.5
    assert [[event.after.name for event in epoch(network)] for _ in range(2)] == [[], ["PROBATIONARY"]]


# Births.


def seed_weights(network: GrowingNetwork, slot: str = "block1") -> list[Tensor]:
    network.germinate(slot, "conv_heavy")
    return [p.detach().clone() for p in network.slots[slot].seed.parameters()]


def test_by_default_seeds_follow_torchs_seed_and_leave_its_generator_alone() -> None:
    weights = []
    for seed in (3, 3, -1):
        torch.manual_seed(seed)
        torch.rand(abs(seed))  # the number of earlier draws has no effect
        before = torch.get_rng_state()
        weights.append(seed_weights(growing(generator=None)))
        assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not torch.equal(weights[0][0], weights[2][0])


@pytest.mark.parametrize("birth", ["identity", "random"])
def test_seeds_come_from_the_generator_that_was_given_and_are_born_as_the_lifecycle_says(birth: Any) -> None:
    network = growing(LifecycleConfig(birth=birth), generator=generator_of(11))
    network.germinate("block1", "conv_heavy")
    seed = network.slots["block1"].seed
    expected = build_seed("conv_heavy", "image", 4, device=CPU, generator=generator_of(11), birth=birth)
    assert all(torch.equal(a, b) for a, b in zip(seed.parameters(), expected.parameters(), strict=True))
    x = torch.randn(2, 4, 8, 8, generator=generator_of(2))
    assert torch.equal(seed(x), x) is (birth == "identity")


# Measurements.


def test_gradients_are_measured_at_each_tick_unless_they_are_given() -> None:
    network = growing(LifecycleConfig(training_ticks=9))
    network.germinate("block1", "norm")
    assert network.measure_gradients() == {}
    loss_on(network.module, batch_of("image")).backward()
    network.germinate("block2.pool", "norm")  # after the backward pass
    network.end_epoch()
    assert network.measurements["block1"].gradient == network.measure_gradients()["block1"]
    assert network.refusal_reasons("block2.pool").blending == ["gradient not measured", "0 of 9 ticks in TRAINING"]
    network.end_epoch(gradients={"block1": CALM, "block2.pool": NO_GRADIENT})
    assert [network.evidence(name).gradient for name in network.slots] == [CALM, NO_GRADIENT]
    network.optimizer.zero_grad()
    network.end_epoch()
    assert network.evidence("block1").gradient is None  # a gradient of the previous epoch is not valid for this one


# Refusals.


@pytest.mark.parametrize("stage", [Stage.DORMANT, *LIFE], ids=lambda stage: stage.name)
def test_every_refusal_names_the_slot_and_the_reasons_and_changes_nothing(stage: Stage) -> None:
    network = growing()
    if stage is not Stage.DORMANT:
        grow_to_stage(network, "block1", stage)
        message = f"slot 'block1': {stage.name} cannot become GERMINATED; allowed: "
        check_refused(network, lambda: network.germinate("block1", "norm"), message)
    if stage is not Stage.PROBATIONARY:
        message = f"slot 'block1' cannot be fossilized: {stage.name} is not PROBATIONARY"
        check_refused(network, lambda: network.fossilize("block1"), message)
    if stage in (Stage.DORMANT, Stage.FOSSILIZED):
        message = f"slot 'block1' cannot be culled: no live seed in {stage.name}"
        check_refused(network, lambda: network.cull("block1"), message)
    if stage is not Stage.TRAINING:
        assert network.refusal_reasons(next(iter(network.slots))).blending == [f"{stage.name} is not TRAINING"]


def test_gates_refuse_with_all_their_reasons() -> None:
    network = growing(LifecycleConfig(training_ticks=3, min_cull_age=5, min_gradient_health=1.0, auto_cull=False))
    network.germinate("block1", "norm", ticks=4)
    network.end_epoch(gradients={"block1": CALM._replace(vanished=0.5)})
    unhealthy = "gradient health 0.75 below 1"
    assert network.refusal_reasons("block1").blending == [unhealthy, "0 of 3 ticks in TRAINING"]
    message = "slot 'block1' cannot be culled: 1 ticks old, younger than 5"
    check_refused(network, lambda: network.cull("block1"), message)
    for stage in (Stage.BLENDING, Stage.PROBATIONARY):
        network.slots["block1"].move_to(stage)
    message = f"slot 'block1' cannot be fossilized: {unhealthy}; alpha is still moving; contribution not measured"
    check_refused(network, lambda: network.fossilize("block1"), message)


UNKNOWN = "unknown slot 'blok1'; did you mean 'block1'?"


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda network: network.germinate("blok1", "norm"), UNKNOWN),
        (lambda network: network.fossilize("blok1"), UNKNOWN),
        (lambda network: network.cull("blok1"), UNKNOWN),
        (lambda network: network.remove_seed("blok1"), UNKNOWN),
        (lambda network: network.end_epoch({"blok1": 1.0}), UNKNOWN),
        (lambda network: network.end_epoch(None, {"blok1": CALM}), UNKNOWN),
        (lambda network: network.germinate("block2.pool", "conv_lite"), "unknown blueprint 'conv_lite'; did you mean "),
        (lambda network: network.germinate("block2.pool", "mlp"), "blueprint 'mlp' does not grow on image features; "),
        (lambda network: network.germinate("block2.pool", "norm", curve="sigmoid"), "unknown curve 'sigmoid'; did you"),
        (lambda network: network.germinate("block2.pool", "norm", ticks=-1), "a ramp takes a whole number of ticks"),
        (lambda network: network.germinate("block2.pool", "norm", ticks=2.5), "a ramp takes a whole number of ticks"),
        (lambda network: network.germinate("block2.pool", "norm", stage="FOSSILIZED"), "a seed cannot begin in 'FOSSI"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_was_meant_and_changes_nothing(
    attempt: Callable[[GrowingNetwork], Any], message: str
) -> None:
    network = growing()
    grow_to_stage(network, "block1", Stage.BLENDING)
    check_refused(network, lambda: attempt(network), message)


def test_a_seed_that_the_optimizer_does_not_take_leaves_its_slot_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    network = growing()

    def full(group: dict[str, Any]) -> None:
        raise ValueError("no more groups")

    with monkeypatch.context() as patch:
        patch.setattr(network.optimizer, "add_param_group", full)
        with pytest.raises(ValueError, match="no more groups"):
            network.germinate("block1", "norm")
    assert not list(network.slots["block1"].parameters())
    network.germinate("block1", "norm")


def test_options_that_the_optimizer_does_not_have_and_networks_without_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^seed_options: the optimizer has no 'wieght_decay'; did you mean 'weight_d"):
        growing(seed_options={"lr": 0.1, "wieght_decay": 0.5})
    assert growing(make=lambda host: Adam(host.parameters()), seed_options={"betas": (0.9, 0.9)})
    host = small_cnn([])
    with pytest.raises(ValueError, match=r"the network has no slots; give it some with attach_slots"):
        GrowingNetwork(host, SGD(host.parameters(), lr=0.1), horizon=5)


# State of optimizers, and growth that is stopped and goes on.


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
