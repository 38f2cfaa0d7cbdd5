"""A small version of benchmarks/cue.py; the benchmark itself measures how well a cue is remembered."""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import cue
from esper_lightning.envs.spaces.choices import ChoiceAction


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """Restore the number of threads, which the benchmark sets to 1."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class FixedAnswers:
    """Policy with fixed answers."""

    def __init__(self, answers: Tensor) -> None:  # [N, heads]
        self.answers = answers

    def act(self, pool: cue.CueMemory) -> ChoiceAction:
        return ChoiceAction(self.answers)


def test_games_are_won_by_who_repeats_the_cue(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeats_half(module: None, pool: cue.CueMemory, seed: int) -> FixedAnswers:
        answers = torch.from_numpy(pool.cue.copy())
        answers[::2] = (answers[::2] + 1) % torch.tensor([cue.ROWS, cue.COLUMNS])
        return FixedAnswers(answers)

    monkeypatch.setattr(cue, "greedy_controller", repeats_half)

    row = cue.train_and_test("none", seed=3, rollouts=1)

    assert row == ("none", cue.ENVS * cue.HORIZON, 3, 0.5)


@pytest.mark.slow
def test_the_benchmark_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results" / "cue.csv"
    monkeypatch.setattr(sys, "argv", ["cue.py", "--seeds", "7", "8", "--csv", str(file)])
    learned = cue.train_and_test
    monkeypatch.setattr(cue, "train_and_test", lambda memory, seed: learned(memory, seed, rollouts=1))

    cue.main()

    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [(row["memory"], row["seed"]) for row in rows] == [(m, s) for m in ("lstm", "none") for s in "78"]
    assert all(row["steps"] == "2560" and 0.0 <= float(row["right"]) <= 0.5 for row in rows)
