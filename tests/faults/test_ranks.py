"""Several processes of one run: a signal to any of them stops all, and the death of any ends all."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from esper_lightning.errors import EXIT_LOST_RANK
from esper_lightning.process import EXIT_OUTPUT_FAILED
from tests.ranks import DieOnce, StopAt, fit_in_ranks, start_ranks
from tests.runs import HORIZON, ROOT, TINY, differences, fit, load, only_run, with_callback

HOSTS = ("--data.n_envs=2", "--trainer.max_epochs=3")
KILLS = 20
SECONDS = 120.0
"""Timeout of whatever takes a few seconds."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def content(path: Path) -> dict:
    """Return what two runs of equal policies and hosts have in common in their checkpoints."""
    saved = load(path)
    return {name: saved[name] for name in ("state_dict", "optimizer_states", "HostPoolData")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run of two processes."""
    root = tmp_path_factory.mktemp("uninterrupted")
    fit_in_ranks(2, root, *HOSTS)
    return only_run(root).last


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tick", range(HORIZON + 1, 2 * HORIZON + 1))
def test_sigterm_to_either_process_saves_the_tick_and_ends_both(
    tick: int, rank: int, uninterrupted: Path, tmp_path: Path
) -> None:
    fit_in_ranks(2, tmp_path, *HOSTS, *with_callback(StopAt, tick=tick, rank=rank), code=143)

    latest = only_run(tmp_path).last
    assert load(latest)["callbacks"]["RolloutState"]["loop"]["ticks"] == tick
    if tick in (HORIZON + 1, 2 * HORIZON):
        fit_in_ranks(2, tmp_path, *HOSTS, "--ckpt_path", str(latest))
        assert differences(content(latest), content(uninterrupted)) == []


def test_the_death_of_a_random_process_at_a_random_moment_ends_the_other_and_the_run_goes_on(
    uninterrupted: Path, tmp_path: Path
) -> None:
    random, killed = Random(0), 0
    for trial in range(3 * KILLS):  # some runs are over before they are killed
        if killed == KILLS:
            break
        root = tmp_path / str(trial)
        root.mkdir()
        victim, latest = random.randrange(2), root / "runs" / "version_0" / "checkpoints" / "last.ckpt"
        with ExitStack() as stack:
            ranks = start_ranks(stack, 2, lambda root=root: fit(root / "runs", *HOSTS), outputs=root)
            wait_until(latest.is_file)
            time.sleep(random.uniform(0.0, 0.5))
            os.kill(ranks[victim].pid, signal.SIGKILL)
            codes = [rank.wait() for rank in ranks]
        if codes == [0, 0]:
            continue
        killed += 1
        assert codes[victim] in (-signal.SIGKILL, 0)
        assert codes[1 - victim] in (EXIT_LOST_RANK, 0)
        lines = re.findall("^error: .*", (root / "0.txt").read_text() + (root / "1.txt").read_text(), re.MULTILINE)
        # Whoever starts the processes reports the death of rank 0.
        assert len(lines) == (1 if victim == 1 and codes[0] else 0), lines
        assert all(
            "another process of the run has ended; find out why, and go on from the last checkpoint" in line
            for line in lines
        )
        fit_in_ranks(2, root / "runs", *HOSTS, "--ckpt_path", str(latest))
        assert differences(content(latest), content(uninterrupted)) == []
    assert killed == KILLS


@pytest.mark.parametrize("victim", [0, 1])
def test_processes_that_the_program_has_started_end_together_with_one_line(victim: int, tmp_path: Path) -> None:
    flags = (*TINY, "--data.n_envs=2", "--trainer.max_epochs=1000", "--trainer.devices=2")
    command = [sys.executable, "-m", "esper_lightning", "fit", *flags, "--trainer.default_root_dir", str(tmp_path)]
    latest = tmp_path / "version_0" / "checkpoints" / "last.ckpt"
    with (tmp_path / "said.txt").open("w") as said:
        program = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True)
        try:
            wait_until(latest.is_file)
            (other,) = children(program.pid)
            os.kill((program.pid, other)[victim], signal.SIGKILL)
            assert program.wait(SECONDS) != 0
            wait_until(lambda: has_ended(other))
        finally:
            os.killpg(program.pid, signal.SIGKILL) if program.poll() is None else None
    lines = [
        line for line in (tmp_path / "said.txt").read_text().splitlines() if "ended" in line or "terminated" in line
    ]
    assert len(lines) == 1, lines
    load(latest)


def test_an_output_that_cannot_be_written_stops_both_processes_with_a_checkpoint_and_one_line(tmp_path: Path) -> None:
    flags = (*TINY, "--data.n_envs=2", "--trainer.max_epochs=1000", "--trainer.devices=2")
    flags += ("--trainer.enable_progress_bar=true", "--trainer.default_root_dir", str(tmp_path))
    command = [sys.executable, "-m", "esper_lightning", "fit", *flags]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=SECONDS)

    assert ended.returncode == EXIT_OUTPUT_FAILED
    assert "Traceback" not in ended.stderr
    assert len(re.findall("an output that cannot be written", ended.stderr)) == 1
    load(tmp_path / "version_0" / "checkpoints" / "last.ckpt")


def torchrun(ranks: int, *args: str) -> int:
    """Run a tiny training by torchrun, which starts it up to twice again, and return the exit code."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=2", f"--nproc-per-node={ranks}")
    command = [sys.executable, *launcher, "-m", "esper_lightning", "fit", *TINY, *HOSTS, *args]
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.run(command, cwd=ROOT, env=os.environ | variables, timeout=5 * SECONDS).returncode


def test_torchrun_starts_a_run_again_that_goes_on_from_its_last_checkpoint(uninterrupted: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    dying = with_callback(DieOnce, tick=HORIZON + 2, rank=1, done=str(done))

    code = torchrun(2, "--trainer.default_root_dir", str(tmp_path / "runs"), *dying)

    assert code == 0
    assert done.exists()
    assert differences(content(only_run(tmp_path / "runs").last), content(uninterrupted)) == []


def children(pid: int) -> list[int]:
    """Return the ids of the processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_ended(pid: int) -> bool:
    """Return True if a process has ended, also if nobody has asked for its exit code yet."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_until(is_so: object) -> None:
    """Wait until a function returns True; fail after `SECONDS`."""
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.01)
