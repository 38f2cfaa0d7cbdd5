"""Anomaly rules: the state machine, the inputs of the rules, and the page that explains them."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper_lightning.telemetry.anomalies import AnomalyDetector, AnomalyState, next_state, rule_inputs
from esper_lightning.telemetry.anomaly_rules import RULES, AnomalyConfig, Bounds, Limits, Rule, decaying_limits
from tests.runs import ROOT, load

PAGE = (ROOT / "docs" / "reference" / "anomalies.md").read_text()
CONFIG = AnomalyConfig()
ABOVE = Rule(name="kl", metric="kl", side="above", cause="why", settings=("a.b",))
BELOW = replace(ABOVE, side="below")
TWICE = Bounds(warning=1.0, critical=2.0, updates=2, clear=3)


def levels(values: list[float], rule: Rule = ABOVE, bounds: Bounds = TWICE) -> list[int]:
    """Return the level after each of these values."""
    watch, found = AnomalyState(), []
    for value in values:
        watch = next_state(watch, rule, value, limits=Limits(bounds.warning, bounds.critical), bounds=bounds)
        found.append(watch.level)
    return found


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.5, 1.5, 1.5], [0, 1, 1]),
        ([1.5, 0.5, 1.5, 0.5], [0, 0, 0, 0]),  # never out of bounds twice in a row
        ([2.5, 1.5, 2.5, 2.5], [0, 1, 1, 2]),
        ([2.5, 2.5, 0.5, 0.5, 1.5, 0.5, 0.5, 0.5], [0, 2, 2, 2, 1, 1, 1, 0]),
        ([2.5, 2.5, 1.5, 1.5, 1.5, 0.5, 0.5, 0.5], [0, 2, 2, 2, 1, 1, 1, 0]),  # eases to a warning, then clears
        ([2.5, 2.5, 0.5, 1.5, 0.5, 1.5, 0.5], [0, 2, 2, 2, 2, 1, 1]),
        ([math.nan, math.nan], [0, 2]),
        ([-math.inf, math.inf], [0, 2]),
        ([1.0, 1.0, 1.0], [0, 0, 0]),  # a value at its bound is not out of bounds
    ],
)
def test_it_takes_updates_in_a_row_to_get_from_one_level_to_the_next(values: list[float], expected: list[int]) -> None:
    assert levels(values) == expected


def test_below_is_the_mirror_of_above() -> None:
    bounds = Bounds(warning=-1.0, critical=-2.0, updates=2, clear=3)
    values = [2.5, 2.5, 1.5, 1.5, 1.5, 0.5, 0.5, 0.5, 1.5, 1.5]

    assert levels([-value for value in values], BELOW, bounds) == levels(values)


def test_without_a_critical_bound_nothing_is_more_than_a_warning() -> None:
    assert levels([math.nan, 1e9], bounds=replace(TWICE, critical=None)) == [0, 1]


@given(st.lists(st.floats(0.0, 3.0), max_size=30))
def test_a_level_lasts_as_long_as_there_is_nothing_to_say_against_it(values: list[float]) -> None:
    found = levels(values)

    for i, (before, after) in enumerate(zip([0, *found], found, strict=False)):
        recent = values[max(0, i - 1) : i + 1]
        if after > before:
            assert len(recent) == 2 and min(recent) > after
        if after < before:
            assert max(values[i - 2 : i + 1]) <= before, "for three updates it has not been that bad"


def observe(detector: AnomalyDetector, *rows: dict[str, float], progress: float = 0.0) -> list[list[str]]:
    return [[str(change) for change in detector.observe(row, i, progress)] for i, row in enumerate(rows, 1)]


def test_a_record_says_what_it_is_and_where_to_look() -> None:
    said = observe(AnomalyDetector(CONFIG), {"kl": 0.13}, *[{"kl": 0.01}] * 3)

    assert said[0] == [
        "anomaly kl: warning at update 1: 0.13, bound 0.1: updates are too large; "
        "look at model.ppo.lr, model.ppo.epochs, model.ppo.target_kl"
    ]
    assert said[1:] == [[], [], ["anomaly kl: cleared at update 4: 0.01, bound 0.1"]]


def test_what_was_critical_eases_where_the_critical_bound_was_dropped() -> None:
    strict = AnomalyDetector(replace(CONFIG, dead_seeds=Bounds(warning=0.5, critical=0.9, updates=1, clear=1)))
    (raised,) = strict.observe({"dead_seeds.norm": 1.0}, 1, 0.0)
    lenient = AnomalyDetector(replace(CONFIG, dead_seeds=Bounds(warning=0.5, updates=1, clear=1)))
    lenient.load_state_dict(strict.state_dict())

    (eased,) = lenient.observe({"dead_seeds.norm": 1.0}, 2, 0.0)

    assert (raised.level, raised.threshold) == ("critical", 0.9)
    assert (eased.level, eased.threshold) == ("warning", 0.5)
    assert "bound 0.5" in str(eased)


def test_what_is_not_measured_leaves_a_rule_as_it_is() -> None:
    detector = AnomalyDetector(CONFIG)

    observe(detector, {"kl": 0.13}, {}, {}, {}, {"kl": 0.01})

    assert detector.levels == {"kl": 1}


def test_each_head_and_each_blueprint_has_a_state_of_its_own() -> None:
    detector = AnomalyDetector(CONFIG)
    row = {"entropy": 0.0, "entropy.op": 0.05, "entropy.slot": 0.2, "entropy.blueprint": 0.9, "dead_seeds.norm": 0.6}

    observe(detector, row, row, row)

    assert detector.levels == {"entropy.op": 2, "entropy.slot": 1, "entropy.blueprint": 0, "dead_seeds.norm": 1}


@pytest.mark.parametrize(("share", "raised"), [(0.5, {"entropy.tempo": 2}), (0.001, {})])
def test_a_head_with_hardly_ever_a_choice_is_not_looked_at(share: float, raised: dict[str, int]) -> None:
    detector = AnomalyDetector(CONFIG)

    observe(detector, *[{"entropy.tempo": 0.0, "choice_share.tempo": share}] * 3)

    assert detector.levels == raised


@pytest.mark.parametrize(
    ("progress", "floor"), [(0.0, -0.5), (0.1, -0.5), (0.2, -0.2), (0.5, 0.0), (0.9, 0.1), (1.0, 0.1)]
)
def test_more_is_asked_of_the_critic_as_training_goes_on(progress: float, floor: float) -> None:
    for value, level in ((floor + 0.01, 0), (floor - 0.01, 1), (floor - 0.51, 2)):
        detector = AnomalyDetector(CONFIG)
        observe(detector, *[{"explained_variance": value}] * 5, progress=progress)
        assert detector.levels == {"explained_variance": level}


def test_a_policy_may_make_up_its_mind_in_the_end() -> None:
    bounds = Bounds(warning=0.3, critical=0.1)

    assert [decaying_limits(bounds, CONFIG, progress) for progress in (0.0, 0.5, 1.0)] == [
        (0.3, 0.1),
        (0.15, 0.05),
        (0.0, 0.0),
    ]


def test_waiting_is_no_collapse_where_seeds_are_kept() -> None:
    busy, idle = ({"op.WAIT": 0.99, "fossils": kept} for kept in (2.0, 0.06))

    assert rule_inputs(busy, CONFIG)["waiting"] == 0.0
    assert rule_inputs(idle, CONFIG)["waiting"] == 0.99


def test_the_ratio_of_a_frozen_policy_says_nothing_new() -> None:
    ratios = {"ratio_low": 0.9, "ratio_high": 1.2}

    assert "ratio_spread" not in rule_inputs(ratios | {"weight_change": 0.0}, CONFIG)
    assert rule_inputs(ratios | {"weight_change": 1e-3}, CONFIG)["ratio_spread"] == pytest.approx(0.2)


@pytest.mark.parametrize(("norm", "raised"), [(2.5, "grad_norm_high"), (0.3, "grad_norm_low"), (1.4, None)])
def test_a_gradient_is_compared_with_those_before(norm: float, raised: str | None) -> None:
    detector = AnomalyDetector(CONFIG)

    observe(detector, *[{"grad_norm": 1.0}] * 20, *[{"grad_norm": norm}] * 3)

    assert [name for name, level in detector.levels.items() if level] == ([raised] if raised else [])


def test_a_gradient_that_is_not_a_number_is_critical_and_does_not_spoil_the_mean() -> None:
    detector = AnomalyDetector(CONFIG)

    observe(detector, {"grad_norm": 1.0}, *[{"grad_norm": math.nan}] * 3)

    assert detector.levels["grad_norm_high"] == 2
    assert detector.grad_norm.value == pytest.approx(1.0)


ROWS = [
    {"kl": kl, "grad_norm": 1.0 + i % 3, "entropy.op": 0.02 * i, "dead_seeds.norm": float(i % 2)}
    for i, kl in enumerate([0.2, 0.01, 0.3, 0.01, 0.01, 0.01, 0.6, 0.2, 0.2, 0.2])
]


@pytest.mark.parametrize("cut", range(len(ROWS)))
def test_a_saved_detector_goes_on_as_if_it_had_never_stopped(cut: int, tmp_path: Path) -> None:
    whole, first, second = (AnomalyDetector(CONFIG) for _ in range(3))
    expected = [whole.observe(row, i, i / 10) for i, row in enumerate(ROWS)]
    before = [first.observe(row, i, i / 10) for i, row in enumerate(ROWS[:cut])]
    torch.save(first.state_dict(), tmp_path / "state.ckpt")

    second.load_state_dict(load(tmp_path / "state.ckpt"))
    after = [second.observe(row, i, i / 10) for i, row in enumerate(ROWS[cut:], cut)]

    assert before + after == expected
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl": Bounds(warning=0.5, critical=0.1)}, "anomalies.kl: critical must not be reached before warning"),
        ({"ratio_low": Bounds(warning=0.1, critical=0.2)}, "anomalies.ratio_low: critical must not be reached before"),
        ({"least_choice_share": 1.0}, r"anomalies.least_choice_share must lie in \[0, 1\)"),
        ({"least_seeds": 0}, "anomalies.least_seeds must be at least 1"),
        ({"explained_variance_floors": [(0.5, 0.0)]}, "must go up to the whole of training"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AnomalyConfig(**settings)


def test_no_bound_of_no_updates() -> None:
    with pytest.raises(ValueError, match="updates must be at least 1 PPO update, got 0"):
        Bounds(warning=1.0, updates=0)


def row(rule: Rule) -> str:
    """Return a rule as the page shows it."""
    bounds = CONFIG.bounds(rule)
    sign = "> " if rule.side == "above" else "< "
    limits = ["–" if limit is None else f"{sign}{limit:g}" for limit in (bounds.warning, bounds.critical)]
    what = rule.cause.format(what="`…`")
    settings = ", ".join(f"`{name}`" for name in rule.settings)
    cells = [f"`{rule.name}`", f"`{rule.metric}`", *limits, f"{bounds.updates} / {bounds.clear}", what, settings]
    return f"| {' | '.join(cells)} |"


def test_the_page_shows_every_rule_with_its_bounds() -> None:
    table = [line for line in PAGE.splitlines() if re.match(r"\| `\w+` \| `", line)]

    assert table == [row(rule) for rule in RULES]


def test_the_page_says_what_to_do_about_each() -> None:
    described = re.findall(r"^- ((?:`\w+`(?:, )?)+):", PAGE, re.MULTILINE)

    assert sorted(re.findall(r"\w+", " ".join(described))) == sorted(rule.name for rule in RULES)
