"""Anomaly rules: when one is raised and cleared, the metrics that they derive, and the page that explains them."""

import math
import re
from pathlib import Path

import pytest
import torch

from esper_lightning.telemetry.anomalies import RULES, AnomalyDetector, AnomalyState, next_state
from tests.runs import ROOT, load

PAGE = (ROOT / "docs" / "reference" / "telemetry.md").read_text().partition("## Anomalies")[2]

Row = dict[str, float]


@pytest.mark.parametrize(
    ("updates", "out_of_bounds", "raised"),
    [
        (1, "x....x", "xxx..x"),
        (2, "xxxx", ".xxx"),
        (2, "x.x.x", "....."),  # never out of bounds twice in a row
        (2, "xx..x...x", ".xxxxxx.."),
        (3, "xx.xxx", ".....x"),
    ],
)
def test_it_takes_updates_in_a_row_to_raise_and_to_clear(updates: int, out_of_bounds: str, raised: str) -> None:
    state, found = AnomalyState(), ""
    for one in out_of_bounds:
        state = next_state(state, one == "x", updates)
        found += "x" if state.raised else "."

    assert found == raised
    assert state.occurred == ("x" in raised)


def observe(detector: AnomalyDetector, *rows: Row, progress: float = 0.0) -> list[list[str]]:
    return [
        [str(change) for change in detector.observe(row, tick=8 * i, update=i, progress=progress)]
        for i, row in enumerate(rows, 1)
    ]


def raised(*rows: Row, progress: float = 0.0) -> set[str]:
    """Return the anomalies that are raised after these updates."""
    detector = AnomalyDetector()
    observe(detector, *rows, progress=progress)
    return {name for name, state in detector.states.items() if state.raised}


def test_a_record_says_what_it_is_and_where_to_look() -> None:
    said = observe(AnomalyDetector(), {"kl": 0.13}, *[{"kl": 0.01}] * 3)

    assert said[0] == [
        "anomaly kl: raised at update 1: 0.13, bound 0.1: updates are too large; "
        "look at model.ppo.lr, model.ppo.epochs, model.ppo.target_kl"
    ]
    assert said[1:] == [[], [], ["anomaly kl: cleared at update 4: 0.01, bound 0.1"]]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([{"kl": 0.1}], set(), id="a value at its bound is within bounds"),
        pytest.param([{"kl": math.nan}], {"kl"}, id="a value that is no number is out of all bounds"),
        pytest.param([{"gradient_health": 0.5}], {"gradient_health"}, id="below a lower bound"),
        pytest.param([{"kl": 0.2}, {}, {}, {}, {"kl": 0.01}], {"kl"}, id="what is not measured changes nothing"),
        pytest.param(
            [{"entropy": 0.0, "entropy.op": 0.05, "entropy.slot": 0.9, "dead_seeds.norm": 0.6}] * 3,
            {"entropy.op", "dead_seeds.norm"},
            id="each head and each blueprint has a state",
        ),
        pytest.param([{"entropy.tempo": 0.0, "choice_share.tempo": 0.001}] * 3, set(), id="hardly ever a choice"),
        pytest.param([{"entropy.tempo": 0.0, "choice_share.tempo": 0.5}] * 3, {"entropy.tempo"}, id="a choice"),
        pytest.param([{"op.WAIT": 0.99, "fossils": 2.0}] * 3, set(), id="waiting where seeds are kept"),
        pytest.param([{"op.WAIT": 0.99, "fossils": 0.06}] * 3, {"waiting"}, id="waiting where none is kept"),
        pytest.param(
            [{"ratio_low": 1.0, "ratio_high": 1.0, "weight_change": 0.0}] * 2,
            {"frozen_policy"},
            id="ratios of a frozen policy say nothing new",
        ),
        pytest.param(
            [{"ratio_low": 1.0, "ratio_high": 1.0, "weight_change": 0.1}] * 2, {"ratio_one"}, id="one step per update"
        ),
        *(
            pytest.param([{"grad_norm": 1.0}] * 20 + [{"grad_norm": norm}] * 3, found, id=f"gradient norm {norm}")
            for norm, found in ((2.5, {"grad_norm_high"}), (0.3, {"grad_norm_low"}), (1.4, set()))
        ),
        pytest.param(
            [{"grad_norm": 1.0}, *[{"grad_norm": math.nan}] * 3, *[{"grad_norm": 1.0}] * 3],
            set(),
            id="a norm that is no number does not spoil the mean",
        ),
    ],
)
def test_rules(rows: list[Row], expected: set[str]) -> None:
    assert raised(*rows) == expected


@pytest.mark.parametrize(("progress", "floor"), [(0.1, -0.5), (0.2, -0.2), (0.5, 0.0), (1.0, 0.1)])
def test_more_is_asked_of_the_critic_and_less_of_the_entropy_as_training_goes_on(progress: float, floor: float) -> None:
    for shift, expected in ((0.01, set()), (-0.01, {"explained_variance", "entropy.op"})):
        row = {"explained_variance": floor + shift, "entropy.op": 0.3 * (1.0 - progress) + shift}
        assert raised(*[row] * 5, progress=progress) == expected


def test_a_saved_detector_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    cut = 5
    rows = [
        {"kl": kl, "grad_norm": 1.0 + i % 3, "entropy.op": 0.02 * i, "dead_seeds.norm": float(i % 2)}
        for i, kl in enumerate([0.2, 0.01, 0.3, 0.01, 0.01, 0.01, 0.6, 0.2, 0.2, 0.2])
    ]
    whole, first, second = (AnomalyDetector() for _ in range(3))
    expected = observe(whole, *rows)
    assert observe(first, *rows[:cut]) == expected[:cut]
    torch.save(first.state_dict(), tmp_path / "state.ckpt")

    second.load_state_dict(load(tmp_path / "state.ckpt"))

    said = observe(second, *[{}] * cut, *rows[cut:])[cut:]  # with the same numbers of updates
    assert said == expected[cut:] and second.state_dict() == whole.state_dict()


def test_a_rule_can_be_ignored_by_its_name() -> None:
    detector = AnomalyDetector(ignore=["dead_seeds"])

    assert observe(detector, {"dead_seeds.norm": 1.0, "kl": 0.01}) == [[]]
    assert set(detector.states) == {"kl"}
    with pytest.raises(ValueError, match=r"Telemetry\.ignore: no rule is called 'dead'; rules are ratio_high, "):
        AnomalyDetector(ignore=["dead"])


def test_the_page_has_the_row_and_the_remedy_of_each_rule() -> None:
    described = re.findall(r"^- ((?:`\w+`(?:, )?)+):", PAGE, re.MULTILINE)

    assert sorted(re.findall(r"\w+", " ".join(described))) == sorted(rule.name for rule in RULES)
    rows = [
        f"| `{rule.name}` | `{rule.metric}` | {rule.side} "
        f"{'see below' if callable(rule.bound) else f'{rule.bound:g}'} | {rule.updates} "
        f"| {rule.cause.format(what='`…`')} | {', '.join(f'`{name}`' for name in rule.settings)} |"
        for rule in RULES
    ]
    assert "\n".join(rows) in PAGE
