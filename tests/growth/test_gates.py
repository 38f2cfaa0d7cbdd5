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
    reasons_it_is_stuck,
    reasons_to_cull,
)
from tests.growth.grown import CALM

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
        (with_gradient(norm=2500.0), ["gradient norm 2.5e+03 above 100"]),
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
    ("measured", "settings", "reasons"),
    [
        ({"ticks_in_stage": 2}, {"training_ticks": 3}, ["2 of 3 ticks in TRAINING"]),
        ({"ticks_in_stage": 2}, {"training_ticks": 2}, []),
        ({"alpha": 0.0, "contribution": None}, {}, []),
        ({"gradient": CALM._replace(vanished=1.0)}, {"min_gradient_health": 0.4}, []),
    ],
)
def test_a_seed_is_blended_after_its_time_and_if_it_would_not_harm(
    measured: dict[str, Any], settings: dict[str, Any], reasons: list[str]
) -> None:
    assert reasons_against_blending(FIT._replace(**measured), LifecycleConfig(**settings)) == reasons


@pytest.mark.parametrize(
    ("training_ticks", "ticks", "told"),
    [(0, 0, False), (0, 1, True), (0, 2, False), (3, 5, False), (3, 6, True), (3, 7, False)],
)
def test_a_stuck_seed_is_told_once_when_its_time_in_training_is_over_twice(
    training_ticks: int, ticks: int, told: bool
) -> None:
    config, dead = LifecycleConfig(training_ticks=training_ticks), CALM._replace(vanished=1.0)
    reasons = reasons_it_is_stuck(FIT._replace(ticks_in_stage=ticks, gradient=dead), config)
    assert reasons == (["gradient health 0.50 below 0.7"] if told else [])
    assert reasons_it_is_stuck(FIT._replace(ticks_in_stage=ticks), config) == []  # a healthy one never


@pytest.mark.parametrize(("alpha", "reasons"), [(0.949, ["alpha at 0.95, below 0.95"]), (0.95, []), (1.0, [])])
def test_a_seed_is_on_probation_from_alpha_95_percent(alpha: float, reasons: list[str]) -> None:
    assert reasons_against_probation(FIT._replace(alpha=alpha)) == reasons


@pytest.mark.parametrize(("age", "reasons"), [(1, ["1 ticks old, younger than 2"]), (2, []), (9, [])])
def test_a_seed_may_be_culled_once_it_is_old_enough(age: int, reasons: list[str]) -> None:
    assert reasons_against_culling(NEW._replace(age=age), LifecycleConfig(min_cull_age=2)) == reasons


@pytest.mark.parametrize(
    ("measured", "minimum", "reasons"),
    [
        ({"contribution": None}, 1.0, ["contribution not measured"]),
        ({"contribution": NAN}, 1.0, ["contribution not measured"]),
        ({"contribution": 0.0}, 1.0, ["contribution +0.00 points below 1"]),
        ({"contribution": 1.0}, 1.0, []),
        ({"contribution": -0.5}, 0.0, ["contribution -0.50 points below 0"]),
        ({"contribution": -3.0}, None, []),
        ({"contribution": None}, None, []),
        ({"alpha": 0.99}, 1.0, ["alpha is still moving"]),
    ],
)
def test_a_fossil_must_contribute_a_point_at_alpha_1(
    measured: dict[str, Any], minimum: float | None, reasons: list[str]
) -> None:
    config = LifecycleConfig(min_contribution=minimum)
    assert reasons_against_fossilizing(FIT._replace(**measured), config) == reasons


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
