"""Forks of the test's process, which end with the test."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Fork:
    """A fork that runs a function. Its exit code is 0, or that of SystemExit, or 1 if the function raises."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self) -> int:
        """Return the exit code once the fork has ended; that of a signal is negative."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


@contextmanager
def forked(run: Callable[[], object]) -> Iterator[Fork]:
    """Run a function in a fork, which is killed at the end of the context if it still runs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()  # os._exit ends the process before Python prints it
                sys.stderr.flush()
            os._exit(code)
    fork = Fork(pid)
    try:
        yield fork
    finally:
        fork.kill()


def run_in_fork(run: Callable[[], object]) -> tuple[int, str]:
    """Run a function in a fork; return its exit code, also that of SystemExit, and its stdout and stderr together."""
    reading, writing = os.pipe()

    def run_with_pipe() -> None:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)
        try:
            run()
        finally:
            sys.stdout.flush()

    with forked(run_with_pipe) as fork:
        os.close(writing)
        with os.fdopen(reading) as output:
            said = output.read()
        return fork.wait(), said
