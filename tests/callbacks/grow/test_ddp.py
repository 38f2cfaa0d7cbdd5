"""Two processes of DistributedDataParallel that grow one network stay equal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runs import HARD_LIMIT, ROOT


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "accumulated"), [("32-true", 1), ("bf16-mixed", 2)])
def test_two_processes_grow_the_same_network(precision: str, accumulated: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.callbacks.grow.ddp", str(tmp_path), precision, str(accumulated)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        assert process.wait(HARD_LIMIT) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    one, other = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert list(one) == list(other)
    assert sum("seed" in name for name in one) > 2
    assert max(float((one[name] - other[name]).abs().max()) for name in one) == 0.0
