"""Governor callback: the lines that a run prints about rolled-back hosts."""

import re
from pathlib import Path

import pytest
from lightning import Callback, Trainer

from callbacks import Governor
from esper_lightning.module import TamiyoModule
from tests.envs.breaking import set_weight_to_nan
from tests.runs import fit, with_callback

LINE = re.compile(r"host (\d) \(seed \d+\) (.*)")

BROKEN = [
    *(f"0 rolled back at tick {tick}, to tick 0: loss is nan" for tick in (1, 2, 3)),
    "0 ended at tick 4, to tick 0: loss is nan, after 3 rollbacks",
    "1 rolled back at tick 5, to tick 0: loss is nan",
]
"""Host and fate in each line of a rollout that `Breaks` has spoilt."""


class SpoilHosts(Callback):
    """Makes the training of hosts diverge: host 0 in every tick, host 1 in the last tick of a rollout.

    Args:
        rollouts: Number of rollouts to spoil, from the start of the run.
    """

    def __init__(self, rollouts: int) -> None:
        self.rollouts = rollouts

    def on_train_batch_start(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if trainer.current_epoch >= self.rollouts:
            return
        pool, last = pl_module.collector.pool, trainer.is_last_batch
        tick = pool.executor.train_and_validate

        def broken(*args: object, **more: object) -> object:
            pool.executor.train_and_validate = tick
            for host in (0, 1) if last else (0,):
                set_weight_to_nan(pool.envs[host])
            return tick(*args, **more)

        pool.executor.train_and_validate = broken


def governor_lines(
    root: Path, capsys: pytest.CaptureFixture[str], rollouts: int, *args: str
) -> tuple[list[str], list[str]]:
    """Run two rollouts; return the lines about single hosts, and those that count the rest."""
    fit(root, "--trainer.max_epochs=2", *args, *with_callback(SpoilHosts, rollouts=rollouts))
    lines = capsys.readouterr().out.splitlines()
    found = [match for match in map(LINE.fullmatch, lines) if match]
    return [f"{line[1]} {line[2]}" for line in found], [line for line in lines if "more hosts" in line]


def test_every_host_that_diverged_has_a_line_with_its_fate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert governor_lines(tmp_path, capsys, 1) == (BROKEN, [])


@pytest.mark.slow
def test_beyond_the_most_lines_of_a_rollout_hosts_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = "1 more hosts ended and 1 more hosts rolled back in this rollout"
    advice = "if there are many, lower data.env.training.lr"

    assert governor_lines(tmp_path, capsys, 2, "--governor.lines=3") == (2 * BROKEN[:3], 2 * [f"{rest}: {advice}"])


def test_a_negative_number_of_lines_is_refused() -> None:
    with pytest.raises(ValueError, match=r"governor\.lines must not be negative, got -1"):
        Governor(lines=-1)
