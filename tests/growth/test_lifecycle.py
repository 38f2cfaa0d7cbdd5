"""Lifecycle of a seed: transitions and their events, the gates' reasons against them, and statistics of gradients."""

import math
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import nn

from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.gates import (
    EXPLODED_HEALTH_COST,
    NO_GRADIENT,
    VANISHED_HEALTH_COST,
    Evidence,
    GradientStats,
    LifecycleConfig,
    gradient_stats,
    reasons_against_blending,
    reasons_against_culling,
    reasons_against_fossilizing,
    reasons_against_gradient,
    reasons_against_probation,
    reasons_against_training,
    reasons_to_cull,
)
from esper_lightning.growth.lifecycle import SeedEvent, auto_transition, check_slot_names, cull, germinate, slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.by_hand import growing
from tests.growth.grown import CALM, FOLLOWERS, LIFE, SLOTS, generator_of, grow, loss_of, slot_named, small_cnn


def image_slot() -> SeedSlot:
    return SeedSlot("block1", "image", 4)


@pytest.mark.parametrize(("before", "after"), list(product(Stage, Stage)), ids=lambda stage: stage.name)
def test_a_stage_follows_another_or_the_error_names_what_may(before: Stage, after: Stage) -> None:
    slot = image_slot()
    slot.stage = before
    allowed = FOLLOWERS[before.name]
    if after.name in allowed:
        slot.move_to(after)
        assert slot.stage is after
        return
    told = ", ".join(allowed) if allowed else r"nothing \(final\)"
    with pytest.raises(ValueError, match=f"^slot 'block1': {before.name} cannot become {after.name}; allowed: {told}$"):
        slot.move_to(after)
    assert slot.stage is before


def end_epoch(slot: SeedSlot, gradient: GradientStats, config: LifecycleConfig, **options: bool) -> list[SeedEvent]:
    """End a host epoch of a seed that contributes."""
    slot.end_epoch()
    measured: dict[str, Any] = {"alpha": slot.alpha_before, "gradient": gradient, "contribution": 2.0}
    evidence = Evidence(age=slot.age, ticks_in_stage=slot.ticks_in_stage, in_optimizer=True, **measured)
    return auto_transition(slot, evidence, config, horizon=50, **options)


def pass_tick(slot: SeedSlot, config: LifecycleConfig, **options: bool) -> list[str]:
    """Run one host epoch and return its changes of stage, like `TRAINING: placed`."""
    events = end_epoch(slot, CALM, config, **options)
    return [f"{event.after.name}: {event.cause}" for event in events]


def test_without_waiting_times_a_seed_blends_after_its_first_tick_and_its_slot_reopens_at_once() -> None:
    slot, config = image_slot(), LifecycleConfig(embargo_ticks=0)
    germinate(slot, "norm", generator=generator_of())
    assert pass_tick(slot, config) == ["TRAINING: placed", "BLENDING: ready to blend"]
    assert slot.alpha.item() == 1.0
    assert pass_tick(slot, config) == ["PROBATIONARY: alpha reached its target"]
    cull(slot)
    assert pass_tick(slot, config) == ["EMBARGOED: removed", "DORMANT: embargo over"]
    germinate(slot, "norm", generator=generator_of())


def test_a_held_seed_advances_neither_to_blending_nor_to_probation() -> None:
    slot, config = image_slot(), LifecycleConfig(auto_cull=False)
    germinate(slot, "norm", generator=generator_of())
    assert [pass_tick(slot, config, hold=True) for _ in range(3)] == [["TRAINING: placed"], [], []]
    assert pass_tick(slot, config) == ["BLENDING: ready to blend"]
    assert [pass_tick(slot, config, hold=True) for _ in range(3)] == [[]] * 3
    assert pass_tick(slot, config) == ["PROBATIONARY: alpha reached its target"]


@pytest.mark.parametrize("stage", LIFE[:-1], ids=lambda stage: stage.name)
def test_culling_removes_every_trace_of_a_seed_and_closes_the_slot(stage: Stage) -> None:
    network, bare = small_cnn(), small_cnn()
    slot = slot_named(network, "block1.pool")
    grow(slot, stage, "bottleneck", Ramp(3))
    assert str(cull(slot, "too old")) == f"block1.pool: bottleneck {stage.name} → CULLED (too old)"
    assert (slot.stage, slot.blueprint, slot.age, slot.alpha.item()) == (Stage.CULLED, None, 0, 0.0)
    assert list(network.state_dict()) == list(bare.state_dict())
    assert torch.equal(loss_of(network), loss_of(bare))
    with pytest.raises(ValueError, match="CULLED cannot become GERMINATED; allowed: EMBARGOED"):
        germinate(slot, "norm", generator=generator_of())


@pytest.mark.parametrize(("training_ticks", "told"), [(0, 1), (3, 6)])
def test_a_seed_that_is_stuck_in_training_says_so_once_with_the_reasons(training_ticks: int, told: int) -> None:
    slot, events = image_slot(), {}
    grow(slot, Stage.TRAINING)
    config = LifecycleConfig(training_ticks=training_ticks)
    for tick in range(1, 11):
        events[tick] = end_epoch(slot, CALM._replace(exploded=1.0), config)
    (event,) = events.pop(told)
    assert str(event) == "block1: conv_light TRAINING (stuck: gradient health 0.20 below 0.7)"
    assert event.age == told
    assert not any(events.values())


def test_slots_are_found_by_name_in_the_order_of_the_datas_way_and_names_are_checked() -> None:
    assert list(slots_of(small_cnn(list(reversed(SLOTS))))) == SLOTS
    with pytest.raises(ValueError, match=r"^slot 'block1' is named twice; name each slot once$"):
        slots_of(torch.nn.Sequential(image_slot(), image_slot()))
    check_slot_names(("block3", "block1"), iter(SLOTS))
    with pytest.raises(ValueError, match=r"^unknown slot 'block2\.pol'; did you mean 'block2\.pool'\?$"):
        check_slot_names(["block1", "block2.pol"], SLOTS)
    with pytest.raises(ValueError, match=r"^unknown slot 'xyz'; there are: a, b$"):
        check_slot_names(["xyz"], ["a", "b"])


# Gates.


CONFIG = LifecycleConfig(training_ticks=3)

FIT = Evidence(age=9, ticks_in_stage=3, in_optimizer=True, alpha=1.0, gradient=CALM, contribution=2.0)

NEW = Evidence(age=0, ticks_in_stage=0, in_optimizer=False, alpha=0.0)

NAN = float("nan")


def with_gradient(**measured: float) -> Evidence:
    return FIT._replace(gradient=CALM._replace(**measured))


def all_reasons(evidence: Evidence) -> list[list[str]]:
    return [
        reasons_against_training(evidence),
        reasons_against_blending(evidence, CONFIG),
        reasons_against_probation(evidence),
        reasons_against_culling(evidence, CONFIG),
        reasons_against_fossilizing(evidence, CONFIG),
        reasons_to_cull(evidence, CONFIG, horizon=50),
    ]


def test_a_fit_seed_passes_every_gate_and_a_new_one_is_told_every_reason_at_once() -> None:
    assert all_reasons(FIT) == [[]] * 6
    assert all_reasons(NEW) == [
        ["no optimizer holds its parameters"],
        ["gradient not measured", "0 of 3 ticks in TRAINING"],
        ["alpha at 0.00, below 0.95"],
        ["0 ticks old, younger than 1"],
        ["gradient not measured", "alpha is still moving", "contribution not measured"],
        [],
    ]


@pytest.mark.parametrize(
    ("evidence", "reasons"),
    [
        (FIT._replace(gradient=None), ["gradient not measured"]),
        (with_gradient(norm=100.0), []),
        (with_gradient(norm=math.nextafter(100.0, 200.0)), ["gradient norm 100 above 100"]),
        (with_gradient(norm=NAN), ["gradient norm nan above 100"]),
        (with_gradient(vanished=0.6), []),  # health 0.7
        (with_gradient(vanished=1.0), ["gradient health 0.50 below 0.7"]),
        (with_gradient(norm=NAN, exploded=0.5), ["gradient norm nan above 100", "gradient health 0.60 below 0.7"]),
    ],
)
def test_a_gradient_must_be_known_calm_and_alive(evidence: Evidence, reasons: list[str]) -> None:
    assert reasons_against_gradient(evidence, CONFIG) == reasons
    # Both gates that check the gradient give this reason, and no other here.
    assert reasons_against_blending(evidence, CONFIG) == reasons_against_fossilizing(evidence, CONFIG) == reasons


@pytest.mark.parametrize(
    ("reasons_of", "measured", "settings", "reasons"),
    [
        (reasons_against_blending, {"ticks_in_stage": 2}, {"training_ticks": 3}, ["2 of 3 ticks in TRAINING"]),
        (reasons_against_blending, {"ticks_in_stage": 2}, {"training_ticks": 2}, []),
        (reasons_against_blending, {"alpha": 0.0, "contribution": None}, {}, []),
        (reasons_against_blending, {"gradient": CALM._replace(vanished=1.0)}, {"min_gradient_health": 0.4}, []),
        (reasons_against_culling, {"age": 1}, {"min_cull_age": 2}, ["1 ticks old, younger than 2"]),
        (reasons_against_culling, {"age": 2}, {"min_cull_age": 2}, []),
        (reasons_against_fossilizing, {"contribution": None}, {}, ["contribution not measured"]),
        (reasons_against_fossilizing, {"contribution": NAN}, {}, ["contribution not measured"]),
        (reasons_against_fossilizing, {"contribution": 0.0}, {}, ["contribution +0.00 points below 1"]),
        (reasons_against_fossilizing, {"contribution": 1.0}, {}, []),
        (
            reasons_against_fossilizing,
            {"contribution": -0.5},
            {"min_contribution": 0.0},
            ["contribution -0.50 points below 0"],
        ),
        (reasons_against_fossilizing, {"contribution": -3.0}, {"min_contribution": None}, []),
        (reasons_against_fossilizing, {"contribution": None}, {"min_contribution": None}, []),
        (reasons_against_fossilizing, {"alpha": 0.99}, {}, ["alpha is still moving"]),
        (lambda evidence, _: reasons_against_probation(evidence), {"alpha": 0.949}, {}, ["alpha at 0.95, below 0.95"]),
        (lambda evidence, _: reasons_against_probation(evidence), {"alpha": 0.95}, {}, []),
    ],
)
def test_each_gate_asks_for_its_own_settings(
    reasons_of: Callable[..., list[str]], measured: dict[str, Any], settings: dict[str, Any], reasons: list[str]
) -> None:
    assert reasons_of(FIT._replace(**measured), LifecycleConfig(**settings)) == reasons


@pytest.mark.parametrize(
    ("contribution", "ticks", "reasons"),
    [
        (None, 0, []),
        (0.1, 4, []),
        (0.0, 4, ["contribution +0.00 points is not positive"]),
        (NAN, 4, ["contribution +nan points is not positive"]),
        (None, 5, ["on probation for 5 ticks, contribution never measured"]),
        (0.1, 5, ["on probation for 5 ticks"]),
        (-1.0, 6, ["contribution -1.00 points is not positive", "on probation for 5 ticks"]),
    ],
)
def test_a_seed_on_probation_goes_when_it_is_useless_or_late(
    contribution: float | None, ticks: int, reasons: list[str]
) -> None:
    evidence = FIT._replace(contribution=contribution, ticks_in_stage=ticks)
    assert reasons_to_cull(evidence, CONFIG, horizon=50) == reasons
    later = evidence._replace(ticks_in_stage=ticks + 5)  # a tenth of 100 ticks are five more
    assert [reason.replace("10 ticks", "5 ticks") for reason in reasons_to_cull(later, CONFIG, horizon=100)] == reasons
    assert reasons_to_cull(evidence, LifecycleConfig(auto_cull=False), horizon=50) == []
    assert reasons_to_cull(evidence._replace(alpha=0.99), CONFIG, horizon=50) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({name: -1}, f"{name} must not be neg") for name in ("training_ticks", "embargo_ticks", "min_cull_age")),
        ({"min_gradient_health": 1.1}, r"min_gradient_health must lie in \[0, 1\], got 1.1"),
        ({"isolation": "proximall"}, "isolation 'proximall' is not known; did you mean 'proximal'"),
        ({"birth": "identical"}, "birth 'identical' is not known; did you mean 'identity'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^lifecycle\.{message}"):
        LifecycleConfig(**settings)


# Gradient statistics.

SHARES = [i / 200 for i in range(201)]


def parameter(gradient: list[float] | None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.ones(2 if gradient is None else len(gradient), dtype=dtype))
    made.grad = None if gradient is None else torch.tensor(gradient, dtype=dtype)
    return made


def stats(*gradients: list[float] | None) -> GradientStats:
    return GradientStats(*gradient_stats([parameter(gradient) for gradient in gradients]).tolist())


def health(vanished: float, exploded: float) -> float:
    return GradientStats(norm=1.0, rms=1.0, vanished=vanished, exploded=exploded).health


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([], (0.0, 0.0, 0.0, 0.0)),
        ([None], (0.0, 0.0, 1.0, 0.0)),
        ([[3.0, 0.0], [0.0, 4.0]], (5.0, 2.5, 0.0, 0.0)),
        ([None, [3.0], [4.0]], (5.0, 2.5, 1 / 3, 0.0)),  # two elements without and one each with a gradient
    ],
)
def test_norm_and_rms_are_global_each_named_and_defined_for_nothing(
    gradients: list[list[float] | None], expected: tuple[float, ...]
) -> None:
    """F13: norm and RMS are taken over all elements, under separate names; they are defined without gradients."""
    assert stats(*gradients) == pytest.approx(expected)
    assert gradient_stats([], torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([[1e-8], [1.0], [1.0], [1.0]], 0.875),  # 1 - 0.5/4
        ([[5.1], [1.0]], 0.6),  # 1 - 0.8/2
        ([[6.0], [60.0], [-600.0]], 0.2),
        ([[4.0, 4.0], [1.0]], 0.6),  # each element is below 5, but the tensor's norm is not
        ([[4.9], [2e-7]], 1.0),
        ([[1e-9], None, [7.0], [1.0]], 0.55),  # 1 - 0.5·2/4 - 0.8/4
        ([None, None, None], 0.5),
        ([[1.0], [math.nan]], 0.6),
        ([[1.0], [math.inf]], 0.6),
    ],
)
def test_health_counts_tensors_that_vanished_or_exploded(gradients: list[list[float] | None], expected: float) -> None:
    assert stats(*gradients).health == pytest.approx(expected)
    assert health(1.0, 1.0) == 0.0


def test_frozen_parameters_count_nowhere() -> None:
    frozen, old = parameter([30.0, 40.0]), parameter(None)
    for each in (frozen, old):
        each.requires_grad = False
    learning = [parameter([3.0]), parameter([4.0])]
    assert GradientStats(*gradient_stats([frozen, *learning, old]).tolist()) == stats([3.0], [4.0])
    assert GradientStats(*gradient_stats([frozen, old]).tolist()) == NO_GRADIENT


@pytest.mark.parametrize(
    ("seed", "host", "ratio"),
    [(3.0, 4.0, 0.75), (0.0, 4.0, None), (3.0, 0.0, None), (math.inf, 4.0, None), (3.0, math.nan, None)],
)
def test_a_ratio_needs_two_gradients_that_say_something(seed: float, host: float, ratio: float | None) -> None:
    assert NO_GRADIENT._replace(norm=seed).ratio(NO_GRADIENT._replace(norm=host)) == ratio


@pytest.mark.parametrize("others", [0.0, 0.25, 0.9])
def test_health_is_a_continuous_function_of_the_tensors_that_learn(others: float) -> None:
    """F14: health falls by the named costs per share of tensors that vanished or exploded, and never jumps."""
    for along in (lambda share: health(share, others), lambda share: health(others, share)):
        path = [along(share) for share in SHARES]
        largest = max(VANISHED_HEALTH_COST, EXPLODED_HEALTH_COST) / (len(SHARES) - 1)
        assert all(0.0 <= before - after <= largest + 1e-9 for before, after in pairwise(path))
        assert path[0] > path[-1]


def test_gradients_can_be_collected_twice() -> None:
    """F20: collecting gradient statistics changes nothing; a second collection returns the same values."""
    network = growing()
    network.germinate("block1", "conv_light")
    loss_of(network.module).backward()
    first, second = network.gradient_stats_tensor(), network.gradient_stats_tensor()
    assert (first[:2, 0] > 0).all(), "host and seed have gradients"
    assert torch.equal(first, second)
    assert network.measure_gradients() == network.measure_gradients() != {}
