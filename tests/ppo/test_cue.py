"""A small version of benchmarks/cue.py; the benchmark itself measures how well a cue is remembered."""

import pytest
import torch
from torch import Tensor

from benchmarks import cue
from esper_lightning.envs.spaces.choices import ChoiceAction


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
