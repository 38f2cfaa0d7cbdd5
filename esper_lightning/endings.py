"""How the program ends when it cannot go on: one line on stderr that says why, and an exit code."""

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

DISK_FAILURES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""Errors that are the disk's and neither ours nor a setting's."""


NO_MEMORY = "the settings ask for more memory than there is; make hosts, policy, horizon or data.n_envs smaller"


def fail(message: str, code: int = BAD_INPUT) -> NoReturn:
    """Ends with one line on stderr."""
    line = re.sub(r"\s+", " ", message).strip()
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(code)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Around what a user's settings can make fail before the run begins; a run's own errors keep their traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, MisconfigurationException) as error:
        fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fail(NO_MEMORY)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what is behind it, each once: what a thread raises again and again can be its own cause."""
    met: set[int] = set()
    while error is not None and id(error) not in met:
        met.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def disk_failure(error: BaseException) -> OSError | None:
    """The failure of a disk behind `error`, if that is what it is: torch's writer hides it behind one of its own."""
    found = (cause for cause in causes(error) if isinstance(cause, OSError) and cause.errno in DISK_FAILURES)
    return next(found, None)


def removed_file(error: BaseException, folder: Path) -> Path | None:
    """The file or folder within `folder` that is missing, if that is what is behind `error`."""
    for cause in causes(error):
        if isinstance(cause, FileNotFoundError) and cause.filename is not None:
            path = Path(os.fsdecode(cause.filename))
            if path.is_relative_to(folder):
                return path
    return None
