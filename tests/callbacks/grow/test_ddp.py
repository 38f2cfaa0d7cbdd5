"""Two processes of DistributedDataParallel that grow one network stay equal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runs import HARD_LIMIT, ROOT

pytestmark = pytest.mark.slow


def train_in_two_processes(folder: Path, *args: str | int | Path) -> list[dict[str, torch.Tensor]]:
    """Run the program and return the parameters that each process ends with."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.callbacks.grow.ddp", str(folder), *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        assert process.wait(HARD_LIMIT) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two networks with the same parameters."""
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(("precision", "accumulated"), [("32-true", 1), ("bf16-mixed", 2)])
def test_two_processes_grow_the_same_network(precision: str, accumulated: int, tmp_path: Path) -> None:
    one, other = train_in_two_processes(tmp_path, precision, accumulated, 8)

    assert sum("seed" in name for name in one) > 2
    assert difference(one, other) == 0.0


def test_two_processes_go_on_from_their_checkpoint_as_if_they_had_not_stopped(tmp_path: Path) -> None:
    whole, _ = train_in_two_processes(tmp_path / "whole", "32-true", 1, 8)
    train_in_two_processes(tmp_path / "half", "32-true", 1, 4)
    resumed = train_in_two_processes(tmp_path / "rest", "32-true", 1, 8, tmp_path / "half" / "last.ckpt")

    assert [difference(whole, of_rank) for of_rank in resumed] == [0.0, 0.0]
