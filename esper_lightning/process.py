"""Standard streams, signals and memory of the process.

This module imports nothing that takes time, so that the program is prepared before it imports torch.
"""

import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TextIO

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask the process to stop: `kill`, Ctrl-C, and a terminal that was closed."""

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
"""Environment variables by which torchrun, SLURM and Lightning's launcher number the processes of a run."""

BEFORE_TRAINING = "before training began"
"""Ending of the line about a signal that comes while the program starts."""

EXIT_READER_GONE = 128 + signal.SIGPIPE
"""Exit code of a program whose output nobody reads any more, as that of a program which SIGPIPE has ended."""

EXIT_OUTPUT_FAILED = 1
"""Exit code of a program whose output cannot be written for another reason, such as a full disk."""


class Output:
    """Text stream that notes a failure to write instead of raising it, and drops what follows.

    While `deferred` is False, a failure in the main thread ends the program with one line on stderr. While it is True,
    the program goes on: a run saves first, and looks at `failure` then. A terminal that was closed is no failure: it
    ends the program by SIGHUP, unless the user has asked the shell not to send it.

    Args:
        stream: Stream that is written to.
        deferred: See above.
    """

    def __init__(self, stream: TextIO, *, deferred: bool = False) -> None:
        self._stream = stream
        self.deferred = deferred
        self.failure: OSError | None = None
        self._is_terminal = stream.isatty()

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._note(error)
        self._end_if_failed()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._note(error)
        self._end_if_failed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def exit_code(self) -> int:
        """Exit code of a program that ends because of `failure`."""
        return EXIT_READER_GONE if isinstance(self.failure, BrokenPipeError) else EXIT_OUTPUT_FAILED

    @property
    def reason(self) -> str:
        """Reason of `failure` in words."""
        if isinstance(self.failure, BrokenPipeError):
            return "a closed output, which nothing reads any more"
        return f"an output that cannot be written ({self.failure and self.failure.strerror})"

    def _note(self, error: OSError) -> None:
        if not (self._is_terminal and error.errno == errno.EIO):
            self.failure = self.failure or error
        with suppress(OSError, ValueError):  # ValueError: a stream without a descriptor
            descriptor = self._stream.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)  # so that text in the stream's buffer, written when it closes, fails no more
            os.close(null)

    def _end_if_failed(self) -> None:
        if self.failure is None or self.deferred or threading.current_thread() is not threading.main_thread():
            return
        self.deferred = True  # while the program ends, others still write
        print(f"error: stopped by {self.reason}", file=sys.stderr)
        raise SystemExit(self.exit_code)


@contextmanager
def watched_streams(*, silent: bool = False) -> Iterator[None]:
    """Write to stdout through an `Output`, and to stderr through one that never ends the program.

    With `silent`, nothing is written to stdout.

    Descriptors 0 to 2 that are closed are opened on the null device: otherwise the next file that is opened would get
    such a number, and messages would be written into it. Characters that an encoding lacks are written as escapes. Each
    line is written at once, so that a log file shows how far a run is.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    before = sys.stdout, sys.stderr
    given = (None, before[1]) if silent else before
    out, err = (stream or open(os.devnull, "w") for stream in given)  # noqa: SIM115, PTH123  # as long as the process
    for stream in (out, err):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    sys.stdout, sys.stderr = output, _ = Output(out), Output(err, deferred=True)
    try:
        yield
        output.flush()
    except SystemExit as ended:
        output.deferred = ended.code not in (None, 0)  # the earlier reason counts
        output.flush()
        raise
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def exits_on_signals(note: Callable[[], str]) -> Iterator[None]:
    """Let each of `STOP_SIGNALS` end the process at once with one line and the exit code 128 + its number.

    No exception is raised: code that is interrupted anywhere could swallow it, or answer with another one. A signal
    that the process ignores, such as SIGHUP under `nohup`, stays ignored.

    Args:
        note: Returns what the line says behind the name of the signal.
    """

    def exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
        line = f"error: stopped by {signal.Signals(number).name} {note()}\n"
        with suppress(OSError):
            os.write(2, line.encode())  # not through sys.stderr, in which the signal may have interrupted another write
        os._exit(128 + number)

    before = replace_handlers(exit_at_once)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


WATCH_INTERVAL = 1.0
"""Seconds between two looks at the process that has started this one."""


def watch_parent(on_death: Callable[[], object]) -> threading.Thread:
    """Call a function when the process that has started this one has ended. Returns the daemon thread that does it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_INTERVAL)
        on_death()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def replace_handlers(handler: Callable[[int, FrameType | None], object]) -> dict[int, Any]:
    """Install `handler` for each of `STOP_SIGNALS` that the process does not ignore; return the earlier handlers."""
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, handler) for number in numbers}


@contextmanager
def silent_threads(package: str) -> Iterator[None]:
    """Print no traceback of an error in a thread of this package, which raises it again in the main thread."""
    before = threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        if type(error.thread).__module__.partition(".")[0] != package:
            before(error)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def is_first_process() -> bool:
    """Return False if the launcher that started this process gave it another rank than 0."""
    return all(os.environ.get(name, "0") == "0" for name in RANK_VARIABLES)


def main_memory() -> int:
    """Return the main memory of the machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
