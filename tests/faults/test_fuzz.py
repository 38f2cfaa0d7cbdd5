"""Mutated input either works or ends in one line; `python -m tests.faults.fuzz` goes through more of it."""

from pathlib import Path

import pytest

from tests.faults.fuzz import KINDS, failures, fuzz, table

CASES = 510


@pytest.mark.timeout(600)
def test_mutated_input_works_or_ends_in_one_line_and_harms_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = fuzz(CASES, seed=0, root=tmp_path)

    with capsys.disabled():
        print(f"\n{table(cases)}")
    assert failures(cases) == []
    assert len(cases) == CASES >= 500
    for kind in KINDS:  # otherwise the mutator would be too gentle, or too rough to get past the first check
        outcomes = {case.outcome for case in cases if case.kind == kind}
        assert outcomes == {"runs", "refused"}, kind
