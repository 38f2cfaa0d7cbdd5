"""A run that was killed at any moment, checkpoints being written included, ends as if nothing had happened."""

from itertools import islice
from pathlib import Path

import pytest

from tests.faults.kills import Kill, flags_of, trials, untouched
from tests.faults.programs import Start

KILLS, WHILE_WRITING = 5, 2
MOST_RUNS = 12
"""Where a busy machine makes the test look for a draft too late, more runs than three or four are needed."""


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_equal_bit_for_bit(start: Start, tmp_path: Path) -> None:
    kills: list[Kill] = []
    reference = untouched(start, flags_of("fused", "fp32"), tmp_path / "untouched")
    for trial in islice(trials(start, reference, tmp_path, seed=1, aimed=0.6), MOST_RUNS):
        said = "\n".join(map(str, trial.kills))
        assert trial.differences == [], f"this run did not end as it should have:\n{said}"
        kills += trial.kills
        if len(kills) >= KILLS and sum(kill.writing is not None for kill in kills) >= WHILE_WRITING:
            return
    raise AssertionError("too few kills, or too few while a checkpoint was written:\n" + "\n".join(map(str, kills)))
