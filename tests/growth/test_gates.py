"""Reasons of the gates against a change of stage, and none where it is allowed."""

import math
from typing import Any

import pytest

from esper_lightning.growth.gates import (
    Evidence,
    LifecycleConfig,
    reasons_against_blending,
    reasons_against_culling,
    reasons_against_fossilizing,
    reasons_against_gradient,
    reasons_against_probation,
    reasons_against_training,
    reasons_to_cull,
)
from tests.growth.grown import CALM

CONFIG = LifecycleConfig(training_ticks=3)

FIT = Evidence(
    age=9,
    ticks_in_stage=3,
    in_optimizer=True,
    alpha_progress=1.0,
    alpha_at_target=True,
    gradient=CALM,
    contribution=2.0,
)

NEW = Evidence(age=0, ticks_in_stage=0, in_optimizer=False, alpha_progress=0.0, alpha_at_target=False)

NAN = float("nan")


def passing_evidence(**measured: Any) -> Evidence:
    """Return evidence that passes every gate, except for the given values."""
    return FIT._replace(**measured)


def with_gradient(**measured: float) -> Evidence:
    return passing_evidence(gradient=CALM._replace(**measured))


def test_a_fit_seed_passes_every_gate() -> None:
    assert (
        reasons_against_gradient(FIT, CONFIG)
        == reasons_against_training(FIT)
        == reasons_against_blending(FIT, CONFIG)
        == []
    )
    assert (
        reasons_against_probation(FIT, CONFIG)
        == reasons_against_culling(FIT, CONFIG)
        == reasons_against_fossilizing(FIT, CONFIG)
        == []
    )
    assert reasons_to_cull(FIT, CONFIG, horizon=50) == []


def test_a_new_seed_passes_no_gate_and_every_reason_is_told_at_once() -> None:
    assert reasons_against_training(NEW) == ["no optimizer holds its parameters"]
    assert reasons_against_blending(NEW, CONFIG) == ["gradient not measured", "0 of 3 ticks in TRAINING"]
    assert reasons_against_probation(NEW, CONFIG) == ["alpha at 0.00 of its target, below 0.95"]
    assert reasons_against_culling(NEW, CONFIG) == ["0 ticks old, younger than 1"]
    assert reasons_against_fossilizing(NEW, CONFIG) == [
        "gradient not measured",
        "alpha is still moving",
        "contribution not measured",
    ]
    assert reasons_to_cull(NEW, CONFIG, horizon=50) == []


@pytest.mark.parametrize(
    ("evidence", "reasons"),
    [
        (passing_evidence(gradient=None), ["gradient not measured"]),
        (with_gradient(norm=100.0), []),
        (with_gradient(norm=math.nextafter(100.0, 200.0)), ["gradient norm 100 above 100"]),
        (with_gradient(norm=2500.0), ["gradient norm 2.5e+03 above 100"]),
        (with_gradient(norm=float("inf")), ["gradient norm inf above 100"]),
        (with_gradient(norm=NAN), ["gradient norm nan above 100"]),
        (with_gradient(vanished=0.6), []),  # health 0.7
        (with_gradient(vanished=1.0), ["gradient health 0.50 below 0.7"]),
        (with_gradient(exploded=0.5), ["gradient health 0.60 below 0.7"]),
        (
            with_gradient(norm=NAN, vanished=0.2, exploded=1.0),
            ["gradient norm nan above 100", "gradient health 0.10 below 0.7"],
        ),
    ],
)
def test_a_gradient_must_be_known_calm_and_alive(evidence: Evidence, reasons: list[str]) -> None:
    assert reasons_against_gradient(evidence, CONFIG) == reasons
    # Both gates that check the gradient give this reason, and no other here.
    assert reasons_against_blending(evidence, CONFIG) == reasons_against_fossilizing(evidence, CONFIG) == reasons


def test_thresholds_of_the_gradient_are_settings() -> None:
    lenient = LifecycleConfig(min_gradient_health=0.4, max_gradient_norm=1e6)
    assert reasons_against_gradient(with_gradient(norm=2500.0, vanished=1.0), lenient) == []


def test_a_seed_that_no_optimizer_holds_does_not_begin_to_train() -> None:
    assert reasons_against_training(passing_evidence(in_optimizer=False)) == ["no optimizer holds its parameters"]
    assert reasons_against_training(NEW._replace(in_optimizer=True)) == []


@pytest.mark.parametrize("ticks", [0, 1, 2])
def test_a_seed_must_learn_for_a_while_before_it_is_blended(ticks: int) -> None:
    assert reasons_against_blending(passing_evidence(ticks_in_stage=ticks), CONFIG) == [
        f"{ticks} of 3 ticks in TRAINING"
    ]
    assert reasons_against_blending(passing_evidence(ticks_in_stage=ticks), LifecycleConfig(training_ticks=ticks)) == []


@pytest.mark.parametrize(
    ("minimum", "potential", "reasons"),
    [
        (0.0, 0.0, []),
        (0.0, -0.5, ["potential -0.50 points below 0"]),
        (1.5, 1.4, ["potential +1.40 points below 1.5"]),
        (-1.0, -0.5, []),
        (0.0, NAN, ["potential +nan points below 0"]),
        (0.0, None, []),
        (None, -20.0, []),
    ],
)
def test_a_seed_that_would_harm_is_not_blended(
    minimum: float | None, potential: float | None, reasons: list[str]
) -> None:
    config = LifecycleConfig(min_potential=minimum)
    assert reasons_against_blending(passing_evidence(potential=potential), config) == reasons


def test_the_blending_gate_asks_for_neither_alpha_nor_a_contribution() -> None:
    assert (
        reasons_against_blending(passing_evidence(alpha_progress=0.0, alpha_at_target=False, contribution=None), CONFIG)
        == []
    )


@pytest.mark.parametrize(
    ("share", "reasons"),
    [
        (0.0, ["alpha at 0.00 of its target, below 0.95"]),
        (0.94, ["alpha at 0.94 of its target, below 0.95"]),
        (0.95, []),
        (1.0, []),
    ],
)
def test_probation_begins_when_alpha_has_come_close_to_its_target(share: float, reasons: list[str]) -> None:
    assert reasons_against_probation(NEW._replace(alpha_progress=share), CONFIG) == reasons


@pytest.mark.parametrize(("age", "reasons"), [(1, ["1 ticks old, younger than 2"]), (2, []), (9, [])])
def test_a_seed_may_be_culled_once_it_is_old_enough(age: int, reasons: list[str]) -> None:
    assert reasons_against_culling(NEW._replace(age=age), LifecycleConfig(min_cull_age=2)) == reasons
    assert reasons_against_culling(NEW, LifecycleConfig(min_cull_age=0)) == []


@pytest.mark.parametrize(
    ("contribution", "reasons"),
    [
        (None, ["contribution not measured"]),
        (NAN, ["contribution not measured"]),
        (-3.0, ["contribution -3.00 points below 1"]),
        (0.0, ["contribution +0.00 points below 1"]),
        (0.99, ["contribution +0.99 points below 1"]),
        (1.0, []),
    ],
)
def test_a_fossil_must_contribute_a_point(contribution: float | None, reasons: list[str]) -> None:
    assert reasons_against_fossilizing(passing_evidence(contribution=contribution), CONFIG) == reasons


def test_a_fossil_is_kept_as_it_was_measured_so_alpha_must_rest() -> None:
    assert reasons_against_fossilizing(passing_evidence(alpha_at_target=False), CONFIG) == ["alpha is still moving"]
    assert reasons_against_fossilizing(passing_evidence(alpha_progress=0.0), CONFIG) == []


@pytest.mark.parametrize("contribution", [-3.0, 0.0, 5.0, None, NAN])
def test_without_a_threshold_no_contribution_is_asked_for(contribution: float | None) -> None:
    assert (
        reasons_against_fossilizing(passing_evidence(contribution=contribution), LifecycleConfig(min_contribution=None))
        == []
    )


def test_a_threshold_of_zero_is_a_threshold() -> None:
    config = LifecycleConfig(min_contribution=0.0)
    assert reasons_against_fossilizing(passing_evidence(contribution=-0.5), config) == [
        "contribution -0.50 points below 0"
    ]


@pytest.mark.parametrize(
    ("contribution", "ticks", "reasons"),
    [
        (None, 0, []),
        (0.1, 4, []),
        (0.0, 4, ["contribution +0.00 points is not positive"]),
        (-2.5, 4, ["contribution -2.50 points is not positive"]),
        (NAN, 4, ["contribution +nan points is not positive"]),
        (None, 5, ["on probation for 5 ticks, contribution never measured"]),
        (0.1, 5, ["on probation for 5 ticks"]),
        (-1.0, 6, ["contribution -1.00 points is not positive", "on probation for 5 ticks"]),
    ],
)
def test_a_seed_on_probation_goes_when_it_is_useless_or_late(
    contribution: float | None, ticks: int, reasons: list[str]
) -> None:
    evidence = passing_evidence(contribution=contribution, ticks_in_stage=ticks)
    assert reasons_to_cull(evidence, CONFIG, horizon=50) == reasons
    assert reasons_to_cull(evidence, LifecycleConfig(auto_cull=False), horizon=50) == []


@pytest.mark.parametrize(("horizon", "limit"), [(1, 5), (12, 5), (50, 5), (60, 6), (200, 20)])
def test_probation_lasts_the_longer_of_five_ticks_and_a_tenth_of_the_horizon(horizon: int, limit: int) -> None:
    assert CONFIG.probation_limit(horizon) == limit
    assert reasons_to_cull(passing_evidence(ticks_in_stage=limit - 1), CONFIG, horizon) == []
    assert reasons_to_cull(passing_evidence(ticks_in_stage=limit), CONFIG, horizon) == [
        f"on probation for {limit} ticks"
    ]


@pytest.mark.parametrize("name", ["training_ticks", "embargo_ticks", "min_cull_age", "probation_ticks"])
def test_times_are_not_negative(name: str) -> None:
    assert getattr(LifecycleConfig(**{name: 0}), name) == 0
    with pytest.raises(ValueError, match=rf"lifecycle\.{name} must not be negative, got -1"):
        LifecycleConfig(**{name: -1})


@pytest.mark.parametrize("target", [0.0, -0.5, 1.5, NAN])
def test_alpha_must_aim_at_a_share_of_the_seed(target: float) -> None:
    with pytest.raises(ValueError, match=r"lifecycle\.alpha_target must lie in \(0, 1\]"):
        LifecycleConfig(alpha_target=target)


@pytest.mark.parametrize("name", ["min_gradient_health", "min_alpha_reached", "probation_share"])
@pytest.mark.parametrize("value", [-0.1, 1.1, NAN])
def test_shares_lie_between_nothing_and_all(name: str, value: float) -> None:
    assert getattr(LifecycleConfig(**{name: 1.0}), name) == 1.0
    with pytest.raises(ValueError, match=rf"lifecycle\.{name} must lie in \[0, 1\], got {value}"):
        LifecycleConfig(**{name: value})


def test_the_bound_of_the_gradient_is_positive() -> None:
    with pytest.raises(ValueError, match=r"lifecycle\.max_gradient_norm must be positive, got 0"):
        LifecycleConfig(max_gradient_norm=0.0)
