"""Errors that end the program: one line on stderr, and an exit code."""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from esper_lightning.console import printable

CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Text in the RuntimeError that torch raises if the CPU is out of memory."""


def is_out_of_memory(error: Exception) -> bool:
    """Return True if a GPU, torch on the CPU or Python itself ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_OUT_OF_MEMORY in str(error)


EXIT_BAD_INPUT, EXIT_DISK_FAILED, EXIT_DIVERGED, EXIT_INTERRUPTED = 2, 1, 3, 130
"""Exit codes."""

DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""Error numbers of disk failures, as opposed to errors in the program or its settings."""


class DivergedError(ArithmeticError):
    """Error of a run whose policy, or all data to learn from, is not finite.

    The message says which setting to change.
    """


OUT_OF_MEMORY_MESSAGE = (
    "the settings ask for more memory than there is; make hosts, policy, horizon or data.n_envs smaller"
)


def exit_with_error(message: str, code: int = EXIT_BAD_INPUT) -> NoReturn:
    """Print `error: ` and the message as one line to stderr, and exit with `code`."""
    line = printable(re.sub(r"\s+", " ", message).strip())
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(code)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors that a user's settings can cause into one line and an exit; for code before the run begins."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, MisconfigurationException) as error:
        exit_with_error(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        exit_with_error(OUT_OF_MEMORY_MESSAGE)


def exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and its chain of causes, each once: an exception that a thread re-raises can cause itself."""
    seen_ids: set[int] = set()
    while error is not None and id(error) not in seen_ids:
        seen_ids.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def find_disk_error(error: BaseException) -> OSError | None:
    """Return the disk error in the causes of `error`, or None; torch's file writer wraps it in another exception."""
    found = (cause for cause in exception_chain(error) if isinstance(cause, OSError) and cause.errno in DISK_ERRNOS)
    return next(found, None)


def find_missing_path(error: BaseException, folder: Path) -> Path | None:
    """Return the missing path within `folder` if a FileNotFoundError for it caused `error`, else None."""
    for cause in exception_chain(error):
        if isinstance(cause, FileNotFoundError) and cause.filename is not None:
            path = Path(os.fsdecode(cause.filename))
            if path.is_relative_to(folder):
                return path
    return None
