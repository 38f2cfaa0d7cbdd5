"""Runs of the program in processes of their own, which are really killed, and never outlive their test.

Importing torch takes seconds. So a server imports it once, in a single thread and without using it, and forks itself
for every run: each fork is `esper-lightning fit` in a process, a session and a process group of its own.
"""

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
HARD_LIMIT = 120.0
"""Seconds after which a process is killed: many times what it needs, so only a hanging process reaches it."""


class Program(NamedTuple):
    """A started run of the program."""

    pid: int
    output: Path
    """Output of the process so far, stdout and stderr together."""

    wait: Callable[[float], int | None]
    """Function that waits at most so many seconds for the return code (negative: a signal). None: still running."""

    def ended(self) -> int:
        """Wait for the end of the process, and kill it at the time limit."""
        code = self.wait(HARD_LIMIT)
        if code is None:
            self.send(signal.SIGKILL)
            self.wait(HARD_LIMIT)
            raise TimeoutError(f"still running after {HARD_LIMIT} s; it said:\n{self.output.read_text()}")
        return code

    def send(self, number: int) -> None:
        """Send a signal to the process and to all that it has started. The caller must not have waited for its end."""
        os.killpg(self.pid, number)


Start = Callable[[Sequence[str], Path], Program]
"""Function that takes the arguments after `fit` and the file for the program's output."""


@contextmanager
def forked_starter() -> Iterator[Start]:
    """Starts programs one after the other, in forks of a process that has imported torch."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.programs"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # or a line could wait in a buffer where select does not see it
        start_new_session=True,
    ) as server:
        orders, replies = server.stdin, server.stdout
        last: Program | None = None

        def reply(seconds: float) -> int | None:
            if not select.select([replies], [], [], seconds)[0]:
                return None
            if not (line := replies.readline()):
                raise RuntimeError("the process that forks programs has ended; start it by hand to see why")
            return int(line)

        def start(args: Sequence[str], output: Path) -> Program:
            nonlocal last
            if last is not None and last.wait(0.0) is None:  # its test was cut off, and its end is still to be reported
                with suppress(ProcessLookupError):
                    last.send(signal.SIGKILL)
                last.wait(HARD_LIMIT)
            orders.write(json.dumps([str(output), *args]).encode() + b"\n")
            orders.flush()
            pid = reply(HARD_LIMIT)
            if pid is None:
                raise TimeoutError(f"no program was started within {HARD_LIMIT} s")
            last = Program(pid, output, _cache_return_code(reply))
            return last

        try:
            yield start
        finally:
            orders.close()  # at the end of its input the server exits, and kills the programs that it started
            try:
                server.wait(HARD_LIMIT)
            finally:
                server.kill()


@contextmanager
def fresh_starter() -> Iterator[Start]:
    """Starts programs in interpreters of their own, like users do; it takes seconds longer."""
    running: list[subprocess.Popen[bytes]] = []

    def start(args: Sequence[str], output: Path) -> Program:
        with output.open("ab") as file:
            started = subprocess.Popen(
                [sys.executable, "-m", "esper_lightning", "fit", *args],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        running.append(started)

        def wait(seconds: float) -> int | None:
            try:
                return started.wait(seconds)
            except subprocess.TimeoutExpired:
                return None

        return Program(started.pid, output, wait)

    try:
        yield start
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _cache_return_code(reply: Callable[[float], int | None]) -> Callable[[float], int | None]:
    """Return the code of a program's end, which the server reports once; it may be asked for again."""
    code: int | None = None

    def wait(seconds: float) -> int | None:
        nonlocal code
        if code is None:
            code = reply(seconds)
        return code

    return wait


def fork_on_orders() -> list[str]:
    """Fork on every order until the pipe is closed. Return in the forks only: their arguments.

    The server reports the process id of each fork, and its return code when it has ended.
    """
    orders = sys.stdin.buffer.raw
    while line := orders.readline():
        output, *args = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _detach_from_server(output)
            return args
        print(pid, flush=True)
        end = os.pidfd_open(pid)
        ready, _, _ = select.select([end, orders], [], [], HARD_LIMIT)
        if end not in ready:  # the test process has gone, or it hangs
            os.kill(pid, signal.SIGKILL)
        os.close(end)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    raise SystemExit(0)


def _detach_from_server(output: str) -> None:
    """Set a fork up like a process that a shell has just started."""
    os.setsid()
    for path, flags, number in ((os.devnull, os.O_RDONLY, 0), (output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 1)):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test-all` would leave it ignored
    sys.argv = sys.argv[:1]  # Lightning warns of any that it was not given


def wait_for_next_second(folder: Path) -> None:
    """Return when the event file of a program started now will sort after all event files below `folder`.

    TensorBoard's readers order the files of a folder by the second in their names, then by process id as text. Only
    a test starts two programs within one second.
    """
    seconds = [int(path.name.split(".")[3]) for path in folder.rglob("events.out.tfevents.*")]
    while seconds and time.time() < max(seconds) + 1:
        time.sleep(max(seconds) + 1 - time.time())


if __name__ == "__main__":
    import tests.runs  # noqa: F401  # torch, Lightning and all that a run imports
    from esper_lightning.__main__ import main

    gc.collect()
    gc.freeze()  # otherwise the collector would touch, and so copy, all of it in every fork
    try:
        main(["fit", *fork_on_orders()])
        code = 0
    except SystemExit as stopped:
        code = stopped.code or 0
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # tearing down an interpreter with torch takes longer than the run
