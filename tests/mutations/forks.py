"""Runs tests of a copy of the project in forks of a process that has imported the libraries, which takes seconds.

The process imports nothing of the project itself, so that every fork imports the copy's code.
"""

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIBRARIES = ("pytest", "torch", "torchvision", "lightning", "tensorboard", "jsonargparse", "sklearn.datasets", "scipy")
MORE = ("lightning.pytorch.cli", "torch.utils.tensorboard", "matplotlib.pyplot", "hypothesis", "yaml", "rich.progress")

LIMIT = 240
"""Seconds that tests may take before they are killed; below pytest's own limit, or the next reply would be theirs."""


class Forks:
    """The process that forks; see `forks`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, copy: Path, output: Path, *tests: str) -> int:
        """Runs tests of a copy, also those that are deselected by default, until the first failure.

        Returns pytest's exit code, or minus the number of the signal that ended it. What it prints is in `output`.
        """
        # Without plugins that write: copies are tried side by side.
        args = ["-x", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov", *tests]
        print(json.dumps([str(copy), str(output), args]), file=self._process.stdin, flush=True)
        if not (reply := self._process.stdout.readline()):
            raise RuntimeError(
                "the process that forks tests has ended; start `python -m tests.mutations.forks` by hand"
            )
        return int(reply)


@contextmanager
def forks() -> Iterator[Forks]:
    """Starts the process, and ends it with the block."""
    # No bytecode is written: a file that changes twice within a second could be taken for what it was before.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Forks(process)
        finally:
            process.stdin.close()  # at which it ends


def _serve() -> None:
    """Forks for every line of stdin, and prints how the fork ended."""
    for name in (*LIBRARIES, *MORE):
        importlib.import_module(name)
    sys.path.pop(0)  # this folder
    gc.collect()
    gc.freeze()  # or the collector would touch all of it, and so copy it, in every fork
    for line in sys.stdin:
        copy, output, args = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(copy, output, args)
        end = os.pidfd_open(pid)
        if not select.select([end], [], [], LIMIT)[0]:
            os.killpg(pid, signal.SIGKILL)  # with the processes that the tests have started
        os.close(end)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)  # libraries that are taken apart complain


def _run(copy: str, output: str, args: list[str]) -> None:
    """Becomes a process that runs pytest in `copy`. Does not return."""
    import pytest  # only the process that forks has it

    os.setsid()
    with open(os.devnull, "rb") as nothing, open(output, "wb") as file:  # noqa: PTH123  # for their descriptors
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["PYTHONPATH"] = copy  # for programs that tests start
    os.chdir(copy)
    sys.path.insert(0, copy)
    sys.argv = sys.argv[:1]
    try:
        code = int(pytest.main(args))
        sys.stdout.flush()
    finally:
        os._exit(code)  # to take an interpreter with torch apart takes longer than most tests


if __name__ == "__main__":
    _serve()
