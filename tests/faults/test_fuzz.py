"""Mutated input either works or is refused in one line; `python -m tests.faults.fuzz` tries more of it."""

from pathlib import Path

import pytest

from tests.faults.fuzz import KINDS, failures, fuzz, table
from tests.tiers import rest_is_slow

FEW = {"config_file": 6, "command_line": 5, "manifest": 64, "damaged": 40, "checkpoint_content": 7}
"""Cases of the fast tier: 122, mostly of kinds that start no run."""

MANY = {kind: round(510 * share) for kind, share in KINDS.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "count"), rest_is_slow([*FEW.items(), *MANY.items()], lambda case: case[1] == FEW[case[0]])
)
def test_mutated_input_works_or_ends_in_one_line_and_harms_nothing(
    kind: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = fuzz({kind: count}, rng_seed=count, root=tmp_path)

    with capsys.disabled():
        print(f"\n{table(cases)}")
    assert failures(cases) == []
    assert len(cases) == count
    # Otherwise the mutator would be too gentle, or too rough to pass the first check.
    assert {case.outcome for case in cases} == {"runs", "refused"}
