"""Measurements of seeds that a growing network makes or receives."""

from typing import Any

import numpy as np
import pytest

from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.gradient_stats import EXPLODED_NORM, NO_GRADIENT, VANISHED_NORM, GradientStats
from esper_lightning.growth.growing_network import SeedMeasurements
from esper_lightning.growth.stages import Stage
from tests.growth.by_hand import BY_HAND, check_refused, epoch, grow_to_stage, growing
from tests.growth.grown import CALM, add_noise, batch_of, loss_on


def test_a_tensor_as_statistics_agrees_with_numpy_in_double_precision() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "conv_heavy", style="gate")
    add_noise(network.slots["block1"].seed)
    loss_on(network.module, batch_of("image")).backward()
    named = list(network.module.named_parameters())
    expected = []
    for of in (lambda name: ".seed." not in name, lambda name: ".block1.seed." in name, lambda name: False):
        gradients = [p.grad.numpy().astype(np.float64) for name, p in named if of(name)]
        norms = np.array([np.sqrt((gradient**2).sum()) for gradient in gradients])
        numbers = sum(gradient.size for gradient in gradients)
        total = np.sqrt((norms**2).sum())
        expected.append(
            [total, total / np.sqrt(numbers), (norms < VANISHED_NORM).mean(), (norms > EXPLODED_NORM).mean()]
            if numbers
            else [0] * 4
        )
    measured = network.gradient_stats_tensor()
    assert measured.shape == (3, 4)
    np.testing.assert_allclose(measured.numpy(), expected, rtol=1e-5)
    assert measured[2].tolist() == list(NO_GRADIENT)
    assert network.measure_gradients() == {
        "block1": GradientStats(*measured[1].tolist())
    }  # an empty slot has no gradient


def test_only_seeds_with_a_gradient_at_hand_are_named() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "norm")
    assert network.measure_gradients() == {}
    loss_on(network.module, batch_of("image")).backward()
    network.germinate("block2.pool", "norm")  # after the backward pass
    assert list(network.measure_gradients()) == ["block1"]
    network.end_epoch()
    assert network.evidence("block2.pool").gradient is None
    network.optimizer.zero_grad()
    network.end_epoch()
    assert network.evidence("block1").gradient is None  # a gradient of the previous epoch is not valid for this one


def test_what_is_frozen_does_not_count_among_what_should_learn() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "conv_light")
    add_noise(network.slots["block1"].seed)
    weight, bias = network.slots["block1"].seed.parameters()
    loss_on(network.module, batch_of("image")).backward()
    whole = network.measure_gradients()["block1"]
    bias.grad, bias.requires_grad = None, False
    part = network.measure_gradients()["block1"]
    assert part.vanished == whole.vanished == 0.0
    assert part.norm == pytest.approx(weight.grad.double().norm().item(), rel=1e-5)
    assert part.rms == pytest.approx(weight.grad.double().square().mean().sqrt().item(), rel=1e-5)
    assert part.norm < whole.norm


def test_gradients_are_measured_at_each_tick_unless_they_are_given() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "conv_light")
    epoch(network)
    assert network.measurements["block1"].gradient == network.measure_gradients()["block1"]
    assert network.measurements["block2.pool"].gradient is None
    network.end_epoch(gradients={"block1": CALM, "block2.pool": NO_GRADIENT})
    assert network.measurements["block1"].gradient == CALM
    assert network.evidence("block1").gradient == CALM


def test_a_seed_that_is_missing_among_the_gradients_counts_as_not_measured() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "norm")
    network.germinate("block2.pool", "norm")
    network.end_epoch(gradients={"block1": CALM, "block2.pool": CALM})
    network.end_epoch(gradients={"block1": CALM})
    assert [network.measurements[name].gradient for name in network.slots] == [CALM, None]
    assert network.reasons_against_advancing("block1") == []
    assert network.reasons_against_advancing("block2.pool") == ["gradient not measured"]


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
    grow_to_stage(network, "block1", Stage.BLENDING)
    check_refused(network, lambda: network.end_epoch(**measured), "unknown slot 'blok1'; did you mean 'block1'?")


def test_contributions_are_kept_of_blended_seeds_and_the_one_before_as_well() -> None:
    network = growing(BY_HAND)
    network.germinate("block1", "norm", ticks=1)
    epoch(network, contribution={"block1": 9.0})
    assert network.measurements["block1"].contribution is None  # a seed in TRAINING contributes nothing
    network.advance("block1")
    for value in (1.0, 2.0, None):
        epoch(network, contribution=None if value is None else {"block1": value})
    record = network.measurements["block1"]
    assert (record.contribution, record.previous_contribution) == (2.0, 1.0)
    assert network.evidence("block1").contribution == 2.0
    network.cull("block1")
    assert network.measurements["block1"] == SeedMeasurements()


def test_a_new_seed_is_judged_by_nothing_that_the_one_before_showed() -> None:
    network = growing(BY_HAND)
    grow_to_stage(network, "block1", Stage.PROBATIONARY)
    network.cull("block1")
    network.end_epoch()
    network.germinate("block1", "norm")
    evidence = network.evidence("block1")
    assert (evidence.age, evidence.ticks_in_stage, evidence.gradient, evidence.contribution) == (0, 0, None, None)
    assert evidence.in_optimizer


def test_the_potential_is_that_of_the_last_epoch_before_blending_and_survives_a_restart() -> None:
    network = growing(LifecycleConfig(training_ticks=1, min_potential=0.0, min_gradient_health=0.0))
    network.germinate("block1", "norm")
    stages = []
    for potential in (-1.0, -2.0, 3.0, 7.0):
        network.end_epoch(gradients={"block1": CALM}, potentials={"block1": potential})
        stages.append(network.slots["block1"].stage)
    assert stages == [Stage.TRAINING, Stage.TRAINING, Stage.BLENDING, Stage.BLENDING]
    assert network.measurements["block1"].potential == 3.0
    again = growing()
    again.load_state_dict(network.state_dict())
    assert again.measurements == network.measurements


def test_a_potential_of_an_unknown_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown slot 'block7'"):
        growing().end_epoch(potentials={"block7": 1.0})
