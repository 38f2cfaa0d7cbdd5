"""How the program ends when it cannot go on: one line on stderr that says why, and an exit code."""

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


def disk_failure(error: BaseException | None) -> OSError | None:
    """The failure of a disk behind `error`, if that is what it is: torch's writer hides it behind one of its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_FAILURES:
            return error
        error = error.__cause__ or error.__context__
    return None
