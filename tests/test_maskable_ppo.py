"""benchmarks/maskable_ppo.py in miniature; docs/results/ppo.md has its table."""

import re
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")

from benchmarks import maskable_ppo
from benchmarks.rows import read_rows
from tests.gym.configs import write_config
from tests.runs import ROOT

RESULTS = (ROOT / "docs" / "results" / "ppo.md").read_text()


def test_the_pages_table_is_that_of_the_kept_results(capsys: pytest.CaptureFixture[str]) -> None:
    maskable_ppo.main(["table"])

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2 and "\n".join(lines) in RESULTS


@pytest.mark.slow
def test_both_programs_are_measured_on_the_same_hosts(tmp_path: Path) -> None:
    pytest.importorskip("sb3_contrib")
    config, results = write_config(tmp_path / "tiny.yaml", model={"ppo": {"minibatches": 4}}), tmp_path / "results.csv"
    args = ["--config", str(config), "--steps", str(2 * maskable_ppo.ENVS), "--hosts", "2", "--csv", str(results)]

    maskable_ppo.main([*args, "--seeds", "3"])
    first = read_rows(results, maskable_ppo.Row)
    maskable_ppo.main([*args, "--seeds", "3", "4"])

    rows = read_rows(results, maskable_ppo.Row)
    assert rows[:2] == first, "what was measured is not measured again"
    assert [(row.program, row.seed) for row in rows] == [
        (name, seed) for seed in (3, 4) for name in maskable_ppo.TRAINERS
    ]
    assert {(row.config, row.steps) for row in rows} == {("tiny", 96)}
    ours, theirs = rows[:2]
    assert ours.impossible == 0.0 < theirs.impossible < 1.0
    assert all(-1.0 < row.objective < 1.0 and row.steps_per_second > 0.0 for row in rows)
    with pytest.raises(ValueError, match=re.escape("--steps must be a multiple of 96, 48 hosts of 2 steps, got 95")):
        maskable_ppo.train_ours(config, 95, 0, 2)
