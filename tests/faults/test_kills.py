"""A run killed twice at any moments, even while files are written, ends as if it had not been killed."""

from itertools import islice
from pathlib import Path

import pytest

from tests.faults.kills import Kill, flags_of, make_reference, trials
from tests.faults.programs import Start

KILLS, WHILE_WRITING, IN_RECORD = 8, 2, 2
MAX_RUNS = 12
"""Largest number of runs: a busy machine may see drafts too late, so that three or four are not enough."""


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_equal_bit_for_bit(start: Start, tmp_path: Path) -> None:
    kills: list[Kill] = []
    reference = make_reference(start, flags_of("fused", "fp32"), tmp_path / "untouched")
    for trial in islice(trials(start, reference, tmp_path, rng_seed=1, aimed=0.7), MAX_RUNS):
        said = "\n".join(map(str, trial.kills))
        assert trial.differences == [], f"this run did not end as it should have:\n{said}"
        kills += trial.kills
        writing = sum(kill.writing is not None and not kill.record for kill in kills)
        record = sum(kill.record for kill in kills)
        if len(kills) >= KILLS and writing >= WHILE_WRITING and record >= IN_RECORD:
            return
    raise AssertionError("too few kills, or too few while files were written:\n" + "\n".join(map(str, kills)))
