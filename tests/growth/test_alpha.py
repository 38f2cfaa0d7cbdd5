"""Curves and ramps of alpha."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper_lightning.growth.alpha import CURVES, DEFAULT_RAMP, Curve, Ramp

curves = st.sampled_from(sorted(CURVES))
shares = st.floats(0.0, 1.0)


@pytest.mark.parametrize("curve", CURVES)
def test_a_curve_is_exact_at_both_ends(curve: str) -> None:
    assert CURVES[curve](0.0) == 0.0
    assert CURVES[curve](1.0) == 1.0


@given(curve=curves, ticks=st.integers(1, 300))
def test_a_curve_rises_at_every_tick(curve: str, ticks: int) -> None:
    values = [CURVES[curve](tick / ticks) for tick in range(ticks + 1)]
    assert all(earlier < later for earlier, later in pairwise(values))


@given(curve=curves, progress=shares)
def test_a_curve_is_symmetric_about_its_middle(curve: str, progress: float) -> None:
    assert CURVES[curve](progress) + CURVES[curve](1.0 - progress) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("curve", "steepness"), [("sigmoid6", 6.0), ("sigmoid12", 12.0), ("sigmoid24", 24.0)])
@pytest.mark.parametrize("progress", [0.05, 0.25, 0.4, 0.5, 0.9])
def test_a_sigmoid_is_a_scaled_hyperbolic_tangent(curve: str, steepness: float, progress: float) -> None:
    tangent = math.tanh(steepness * (progress - 0.5) / 2.0) / math.tanh(steepness / 4.0)
    assert CURVES[curve](progress) == pytest.approx(0.5 + 0.5 * tangent, abs=1e-12)


def test_the_cosine_passes_through_known_angles() -> None:
    assert CURVES["cosine"](1.0 / 3.0) == pytest.approx(0.25)  # 60 degrees
    assert CURVES["cosine"](2.0 / 3.0) == pytest.approx(0.75)  # 120 degrees


def test_steeper_sigmoids_begin_later() -> None:
    early = [CURVES[curve](0.2) for curve in ("linear", "sigmoid6", "sigmoid12", "sigmoid24")]
    assert early == sorted(early, reverse=True)


def test_a_linear_ramp_takes_equal_steps_and_stays_at_its_target() -> None:
    ramp = Ramp(start=0.0, target=1.0, ticks=4, curve="linear")
    assert [ramp.value(tick) for tick in range(-1, 7)] == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_cosine_ramp_to_a_part_of_the_seed_passes_hand_computed_values() -> None:
    ramp = Ramp(start=0.2, target=0.6, ticks=3, curve="cosine")
    assert [ramp.value(tick) for tick in range(4)] == pytest.approx([0.2, 0.3, 0.5, 0.6])


@given(start=shares, target=shares, ticks=st.integers(1, 40), curve=curves)
def test_a_ramp_goes_from_start_to_target_exactly_and_never_turns_back(
    start: float, target: float, ticks: int, curve: Curve
) -> None:
    ramp = Ramp(start, target, ticks, curve)
    values = [ramp.value(tick) for tick in range(ticks + 1)]
    assert values[0] == start
    assert values[-1] == ramp.value(ticks + 5) == target
    assert values == sorted(values, reverse=target < start)


def test_a_ramp_without_length_is_at_its_target_after_the_first_tick() -> None:
    ramp = Ramp(start=0.0, target=0.7, ticks=0, curve="sigmoid12")
    assert [ramp.value(0), ramp.value(1)] == [0.0, 0.7]


def test_the_ramp_of_an_empty_slot_starts_at_nothing_and_ends_at_all() -> None:
    assert [DEFAULT_RAMP.value(0), DEFAULT_RAMP.value(1)] == [0.0, 1.0]
