"""Every number among the settings may be extreme: a run works or ends in one line, within bounded memory and time."""

from pathlib import Path

import pytest

from tests.faults.limits import ENDINGS, EXTREMES, attempt, attempt_settings, write_tiny_config


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("prefix", "values"),
    [
        ("data.env.training.batches", ("1000000000000000000",)),
        *(
            pytest.param(prefix, EXTREMES, marks=pytest.mark.slow)
            for prefix in ("data", "model", "evaluation", "governor")
        ),
    ],
)
def test_an_extreme_number_works_or_ends_in_one_line(prefix: str, values: tuple[str, ...], tmp_path: Path) -> None:
    write_tiny_config(config := tmp_path / "tiny.yaml")

    outcomes = dict(attempt_settings(config, tmp_path, (prefix,), values, more=()))

    assert {flag: outcome for flag, outcome in outcomes.items() if outcome.what not in ENDINGS.values()} == {}
    assert any(outcome.what == "refused" for outcome in outcomes.values())


def test_a_case_that_takes_too_much_memory_or_raises_is_noticed() -> None:
    assert attempt(lambda: bytearray(2**40)).what == "exit code 1 with 0 error lines"
    assert attempt(lambda: None).what == "runs"
