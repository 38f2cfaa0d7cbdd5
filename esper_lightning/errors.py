"""Errors that end the program: one line on stderr, and an exit code."""

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from esper_lightning.console import escaped, exit_with_error
from esper_lightning.parallel import WorkerDied
from esper_lightning.plugins import PartError
from esper_lightning.user_code import describe, find_setting, find_user_part, named_paths

OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "Storage size calculation overflowed",
    "numel: integer multiplication overflow",
    "Overflow when unpacking long",
)
"""Texts in the RuntimeErrors that torch raises if the CPU is out of memory, or if a tensor would be larger than any."""


def is_out_of_memory(error: Exception) -> bool:
    """Return True if a GPU, torch on the CPU or Python itself ran out of memory."""
    has_text = any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or has_text


EXIT_SYSTEM_FAILED, EXIT_DIVERGED, EXIT_USER_CODE, EXIT_LOST_RANK, EXIT_INTERRUPTED = 1, 3, 4, 5, 130
"""Exit codes; `EXIT_BAD_INPUT` is a further one."""

SYSTEM_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit on the size of files",
    errno.EIO: "check the disk",
    errno.EROFS: "make the file system writable",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the limit on open files of the machine",
    errno.EAGAIN: "raise the limit on processes and threads (ulimit -u)",
}
"""Error numbers of the system: of its disk and its limits, not of the program or its settings. Each with what helps."""

NO_THREAD_TEXT = "can't start new thread"
"""Text of the RuntimeError of a thread that the system does not start."""


class DivergedError(ArithmeticError):
    """Error of a run whose policy, or all data to learn from, is not finite.

    The message says which setting to change.
    """


OUT_OF_MEMORY_MESSAGE = (
    "the settings ask for more memory than there is; make hosts, policy, horizon or data.n_envs smaller"
)


SETTINGS_ERRORS = (
    *(ValueError, TypeError, OSError, ImportError, SyntaxError, MisconfigurationException),
    *(MemoryError, RuntimeError),  # reported only if the memory or another limit of the system is the reason
)
"""Exceptions that a user's settings can cause."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors that a user's settings can cause into one line and an exit; for code before the run begins."""
    try:
        yield
    except SETTINGS_ERRORS as error:
        if (failure := find_system_error(error)) is not None:
            exit_with_error(describe_system_error(failure), EXIT_SYSTEM_FAILED)
        if isinstance(error, MemoryError | RuntimeError):
            if not is_out_of_memory(error):
                raise
            exit_with_error(OUT_OF_MEMORY_MESSAGE)
        if find_user_part(error) is not None:
            raise
        if isinstance(error, SyntaxError):
            exit_with_error(f"{error.filename}, line {error.lineno}: {error.msg}; correct this file")
        exit_with_error(str(error))


@contextmanager
def one_line_system_errors(way_out: str) -> Iterator[None]:
    """Turn an error of the system into one line, which ends with the way out, and an exit."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        failure = find_system_error(error)
        if failure is None and not isinstance(error, WorkerDied):
            raise
        reason = str(error) if failure is None else describe_system_error(failure)
        exit_with_error(f"{reason}, and {way_out}", EXIT_SYSTEM_FAILED)


@contextmanager
def user_code_told_apart(config: Callable[[], Any]) -> Iterator[None]:
    """Report an exception of any kind that code of the user has raised, and exit with `EXIT_USER_CODE`.

    Its traceback is printed without the frames of this project, and then one line that says whose it is. A PartError is
    that one line itself. All other exceptions pass, and an interrupt does.

    Args:
        config: Returns the settings that name the code.
    """

    def report(_: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, KeyboardInterrupt):
            return
        if isinstance(error, PartError):
            exit_with_error(str(error), EXIT_USER_CODE)
        if (line := report_user_part(error, config())) is not None:
            exit_with_error(line, EXIT_USER_CODE)

    with ExitStack() as stack:
        stack.push(report)
        yield


@contextmanager
def user_code_as_part_error() -> Iterator[None]:
    """Report an exception that code of the user has raised, and raise a PartError with a line about it instead.

    For processes that work for another one, which may be unable to read the exception itself.
    """

    def report(_: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, PartError):
            return
        if (line := report_user_part(error, {})) is not None:
            raise PartError(line) from None

    with ExitStack() as stack:
        stack.push(report)
        yield


def report_user_part(error: BaseException, settings: Any) -> str | None:
    """Print an exception that code of the user has raised, with the traceback of that code, and return a line about it.

    None: other code has raised it, and nothing is printed.

    Args:
        error: The exception.
        settings: Settings that name the code.
    """
    part = find_user_part(error, [path for _, path in named_paths(settings)])
    if part is None:
        return None
    print(escaped("".join(traceback.format_exception(type(error), error, part))), end="", file=sys.stderr, flush=True)
    setting = find_setting(part, settings)
    file = Path(part.tb_frame.f_code.co_filename)
    whose = f"your code in {file.name}" if setting is None else f"{setting[0]} ({setting[1]})"
    return f"{whose} raised {describe(error):.400}; the traceback above is of that code"


def exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and its chain of causes, each once: an exception that a thread re-raises can cause itself.

    As in a traceback, `raise … from None` ends the chain.
    """
    seen_ids: set[int] = set()
    while error is not None and id(error) not in seen_ids:
        seen_ids.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def find_system_error(error: BaseException) -> OSError | None:
    """Return the error of the system in the causes of `error`, or None: torch's file writer wraps it in another one."""
    for cause in exception_chain(error):
        if isinstance(cause, OSError) and cause.errno in SYSTEM_REMEDIES:
            return cause
        if isinstance(cause, RuntimeError) and str(cause) == NO_THREAD_TEXT:
            return OSError(errno.EAGAIN, NO_THREAD_TEXT)
    return None


def describe_system_error(failure: OSError) -> str:
    """Return the reason of an error of the system, the name of the file, and what helps."""
    where = f" ({os.fsdecode(failure.filename)})" if failure.filename else ""
    assert failure.errno is not None, "that of a disk or a limit"
    return f"{failure.strerror or failure}{where}; {SYSTEM_REMEDIES[failure.errno]}"


def find_unusable_path(error: BaseException, folder: Path) -> tuple[Path, OSError] | None:
    """Return the path within `folder` that caused `error`, which is missing, no file, or not to be written."""
    for cause in exception_chain(error):
        if not isinstance(cause, FileNotFoundError | IsADirectoryError | NotADirectoryError | PermissionError):
            continue
        if cause.filename is not None:
            path = Path(os.fsdecode(cause.filename))
            if path.is_relative_to(folder):
                return path, cause
    return None
