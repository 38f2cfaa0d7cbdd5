"""Stack in two processes of DistributedDataParallel, which train the network that one process trains."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runs import HARD_LIMIT, ROOT

pytestmark = pytest.mark.slow


def weights(folder: Path, processes: int, *args: Path) -> list[dict[str, torch.Tensor]]:
    """Run the program and return the weights that each process ends with."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.callbacks.stack_ddp", str(folder), str(processes), *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        assert process.wait(HARD_LIMIT) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(processes)]


def test_two_processes_grow_the_network_of_one_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    (alone,) = weights(tmp_path / "alone", 1)
    one, other = weights(tmp_path / "two", 2)
    resumed, _ = weights(tmp_path / "resumed", 2, tmp_path / "two" / "saved.ckpt")

    assert "net.blocks.3.mlp.0.weight" in alone
    assert list(one) == list(other) == list(alone) == list(resumed)
    for name, value in one.items():
        assert torch.equal(value, other[name]) and torch.equal(value, resumed[name])
        torch.testing.assert_close(value, alone[name])
