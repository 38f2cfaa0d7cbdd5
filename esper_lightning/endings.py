"""Errors that end the program: one line on stderr, and an exit code."""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from esper_lightning.envs.failure import is_out_of_memory

BAD_INPUT, DISK_FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes."""

DISK_FAILURES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""Error numbers of disk failures, as opposed to errors in the program or its settings."""


NO_MEMORY = "the settings ask for more memory than there is; make hosts, policy, horizon or data.n_envs smaller"


def fail(message: str, code: int = BAD_INPUT) -> NoReturn:
    """Print `error: ` and the message as one line to stderr, and exit with `code`."""
    line = re.sub(r"\s+", " ", message).strip()
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(code)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors that a user's settings can cause into one line and an exit; for code before the run begins."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, MisconfigurationException) as error:
        fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fail(NO_MEMORY)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and its chain of causes, each once: an exception that a thread re-raises can cause itself."""
    met: set[int] = set()
    while error is not None and id(error) not in met:
        met.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def disk_failure(error: BaseException) -> OSError | None:
    """Return the disk error in the causes of `error`, or None; torch's file writer wraps it in another exception."""
    found = (cause for cause in causes(error) if isinstance(cause, OSError) and cause.errno in DISK_FAILURES)
    return next(found, None)


def removed_file(error: BaseException, folder: Path) -> Path | None:
    """Return the missing path within `folder` if a FileNotFoundError for it caused `error`, else None."""
    for cause in causes(error):
        if isinstance(cause, FileNotFoundError) and cause.filename is not None:
            path = Path(os.fsdecode(cause.filename))
            if path.is_relative_to(folder):
                return path
    return None
