"""Two processes of DistributedDataParallel that grow one network stay equal, and equal to one process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import HARD_LIMIT, ROOT

pytestmark = pytest.mark.slow


Weights = dict[str, torch.Tensor]


def train_together(folder: Path, devices: int = 2, **settings: Any) -> list[Weights]:
    """Run the program and return the parameters that each process ends with."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.callbacks.grow.ddp", str(folder), str(devices), json.dumps(settings)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        assert process.wait(HARD_LIMIT) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(devices)]


def difference(one: Weights, other: Weights) -> float:
    """Return the largest difference of two networks with the same parameters."""
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


@pytest.mark.parametrize(("precision", "accumulated"), [("32-true", 1), ("bf16-mixed", 2)])
def test_two_processes_grow_the_same_network(precision: str, accumulated: int, tmp_path: Path) -> None:
    one, other = train_together(tmp_path, precision=precision, accumulate_grad_batches=accumulated, epochs=9)

    assert sum("seed" in name for name in one) > 2
    assert difference(one, other) == 0.0


def test_two_processes_go_on_from_a_checkpoint_with_seeds_as_if_they_had_not_stopped(tmp_path: Path) -> None:
    whole, _ = train_together(tmp_path / "whole", epochs=9)
    at_the_checkpoint, _ = train_together(tmp_path / "half", epochs=4)
    resumed = train_together(tmp_path / "rest", epochs=9, resume_from=str(tmp_path / "half" / "last.ckpt"))

    assert len(at_the_checkpoint) > len(whole)  # one of its two seeds is culled later
    assert [difference(whole, of_rank) for of_rank in resumed] == [0.0, 0.0]


def test_two_processes_train_what_one_trains_with_the_batches_of_both(tmp_path: Path) -> None:
    (alone,) = train_together(tmp_path / "alone", devices=1, epochs=9, norm=False)
    together, _ = train_together(tmp_path / "together", epochs=9, norm=False)

    assert difference(together, alone) < 1e-5
