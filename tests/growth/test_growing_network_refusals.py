"""Refused operations report their reasons and change nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.gradient_stats import NO_GRADIENT
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.stages import Stage
from tests.growth.by_hand import (
    BY_HAND,
    check_refused,
    grow_to_stage,
    growing,
)
from tests.growth.grown import CALM, LIFE


@pytest.mark.parametrize("stage", [Stage.DORMANT, *LIFE], ids=lambda stage: stage.name)
def test_every_refusal_names_the_slot_and_the_reasons_and_changes_nothing(stage: Stage) -> None:
    network = growing(BY_HAND)
    if stage is not Stage.DORMANT:
        grow_to_stage(network, "block1", stage)
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
    network.end_epoch(gradients={"block1": CALM._replace(vanished=0.5), "block2.pool": NO_GRADIENT})
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
        lambda network: network.remove_seed("blok1"),
        lambda network: network.evidence("blok1"),
        lambda network: network.reasons_against_advancing("blok1"),
        lambda network: network.reasons_against_fossilizing("blok1"),
        lambda network: network.reasons_against_culling("blok1"),
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
    grow_to_stage(network, "block1", Stage.BLENDING)
    check_refused(network, lambda: network.set_alpha("block1", 0.5, **wrong), message)
    if "curve" in wrong:
        check_refused(network, lambda: network.cull("block1", ticks=3, **wrong), message)


def test_a_seed_that_the_optimizer_does_not_take_leaves_its_slot_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    network = growing()

    def full(group: dict[str, Any]) -> None:
        raise ValueError("no more groups")

    with monkeypatch.context() as patch:
        patch.setattr(network.optimizer, "add_param_group", full)
        check_refused(network, lambda: network.germinate("block1", "norm"), "no more groups")
    assert not list(network.slots["block1"].parameters())
    network.germinate("block1", "norm")


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
