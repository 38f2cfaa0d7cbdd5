"""May a seed advance? Reasons against, and none where it may."""

import math

import pytest

from esper_lightning.growth.gates import (
    Evidence,
    LifecycleConfig,
    gate_blending,
    gate_fossil,
    gate_probation,
    gradient_reasons,
    reasons_to_cull,
)

CONFIG = LifecycleConfig()

FIT = Evidence(ticks_in_stage=3, alpha_share=1.0, gradient_norm=1.0, gradient_health=1.0, contribution=2.0)

NAN = float("nan")


def fit(**measured: float | None) -> Evidence:
    """A seed that passes every gate, but for what is named."""
    return FIT._replace(**measured)


def test_a_fit_seed_passes_every_gate() -> None:
    assert gradient_reasons(FIT, CONFIG) == gate_blending(FIT, CONFIG) == []
    assert gate_probation(FIT, CONFIG) == gate_fossil(FIT, CONFIG) == []
    assert reasons_to_cull(FIT, CONFIG, horizon=50) == []


@pytest.mark.parametrize(
    ("evidence", "reasons"),
    [
        (fit(gradient_norm=None), ["gradient not measured"]),
        (fit(gradient_health=None), ["gradient not measured"]),
        (fit(gradient_norm=100.0), []),
        (fit(gradient_norm=math.nextafter(100.0, 200.0)), ["gradient norm 100 above 100"]),
        (fit(gradient_norm=2500.0), ["gradient norm 2.5e+03 above 100"]),
        (fit(gradient_norm=float("inf")), ["gradient norm inf above 100"]),
        (fit(gradient_norm=NAN), ["gradient norm nan above 100"]),
        (fit(gradient_health=0.7), []),
        (fit(gradient_health=0.5), ["gradient health 0.50 below 0.7"]),
        (
            fit(gradient_norm=NAN, gradient_health=0.1),
            ["gradient norm nan above 100", "gradient health 0.10 below 0.7"],
        ),
    ],
)
def test_a_gradient_must_be_known_calm_and_alive(evidence: Evidence, reasons: list[str]) -> None:
    assert gradient_reasons(evidence, CONFIG) == reasons
    # Both gates that let a seed into the host's output ask for it, and name nothing else here.
    assert gate_blending(evidence, CONFIG) == gate_fossil(evidence, CONFIG) == reasons


def test_thresholds_of_the_gradient_are_settings() -> None:
    lenient = LifecycleConfig(min_gradient_health=0.4, max_gradient_norm=1e6)
    assert gradient_reasons(fit(gradient_norm=2500.0, gradient_health=0.5), lenient) == []


@pytest.mark.parametrize("ticks", [0, 1, 2])
def test_a_seed_must_learn_for_a_while_before_it_is_blended(ticks: int) -> None:
    assert gate_blending(fit(ticks_in_stage=ticks), CONFIG) == [f"{ticks} of 3 ticks in TRAINING"]
    assert gate_blending(fit(ticks_in_stage=ticks), LifecycleConfig(training_ticks=ticks)) == []


def test_the_blending_gate_tells_all_reasons_at_once() -> None:
    assert gate_blending(Evidence(ticks_in_stage=1, alpha_share=0.0), CONFIG) == [
        "gradient not measured",
        "1 of 3 ticks in TRAINING",
    ]


def test_the_blending_gate_does_not_ask_for_a_contribution() -> None:
    assert gate_blending(fit(alpha_share=0.0, contribution=None), CONFIG) == []


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
    assert gate_probation(Evidence(ticks_in_stage=9, alpha_share=share), CONFIG) == reasons


@pytest.mark.parametrize(
    ("contribution", "reasons"),
    [
        (None, ["contribution not measured"]),
        (-3.0, ["contribution -3.00 points below 1"]),
        (0.0, ["contribution +0.00 points below 1"]),
        (0.99, ["contribution +0.99 points below 1"]),
        (1.0, []),
    ],
)
def test_a_fossil_must_contribute_a_point(contribution: float | None, reasons: list[str]) -> None:
    assert gate_fossil(fit(contribution=contribution), CONFIG) == reasons


@pytest.mark.parametrize("contribution", [-3.0, 0.0, 5.0])
def test_without_a_threshold_any_measured_contribution_will_do(contribution: float) -> None:
    config = LifecycleConfig(min_contribution=None)
    assert gate_fossil(fit(contribution=contribution), config) == []
    assert gate_fossil(fit(contribution=None), config) == ["contribution not measured"]


def test_a_threshold_of_zero_is_a_threshold() -> None:
    config = LifecycleConfig(min_contribution=0.0)
    assert gate_fossil(fit(contribution=-0.5), config) == ["contribution -0.50 points below 0"]


@pytest.mark.parametrize(
    ("contribution", "ticks", "reasons"),
    [
        (None, 0, []),
        (0.1, 4, []),
        (0.0, 4, ["contribution +0.00 points is not positive"]),
        (-2.5, 4, ["contribution -2.50 points is not positive"]),
        (None, 5, ["on probation for 5 ticks"]),
        (0.1, 5, ["on probation for 5 ticks"]),
        (-1.0, 6, ["contribution -1.00 points is not positive", "on probation for 5 ticks"]),
    ],
)
def test_a_seed_on_probation_goes_when_it_is_useless_or_late(
    contribution: float | None, ticks: int, reasons: list[str]
) -> None:
    evidence = fit(contribution=contribution, ticks_in_stage=ticks)
    assert reasons_to_cull(evidence, CONFIG, horizon=50) == reasons
    assert reasons_to_cull(evidence, LifecycleConfig(auto_cull=False), horizon=50) == []


@pytest.mark.parametrize(("horizon", "limit"), [(1, 5), (12, 5), (50, 5), (60, 6), (200, 20)])
def test_probation_lasts_the_longer_of_five_ticks_and_a_tenth_of_the_horizon(horizon: int, limit: int) -> None:
    assert CONFIG.probation_limit(horizon) == limit
    assert reasons_to_cull(fit(ticks_in_stage=limit - 1), CONFIG, horizon) == []
    assert reasons_to_cull(fit(ticks_in_stage=limit), CONFIG, horizon) == [f"on probation for {limit} ticks"]


@pytest.mark.parametrize("name", ["training_ticks", "embargo_ticks", "min_cull_age", "probation_ticks"])
def test_times_are_not_negative(name: str) -> None:
    assert getattr(LifecycleConfig(**{name: 0}), name) == 0
    with pytest.raises(ValueError, match=rf"lifecycle\.{name} must not be negative, got -1"):
        LifecycleConfig(**{name: -1})


@pytest.mark.parametrize("target", [0.0, -0.5, 1.5, NAN])
def test_alpha_must_aim_at_a_share_of_the_seed(target: float) -> None:
    with pytest.raises(ValueError, match=r"lifecycle\.alpha_target must lie in \(0, 1\]"):
        LifecycleConfig(alpha_target=target)
