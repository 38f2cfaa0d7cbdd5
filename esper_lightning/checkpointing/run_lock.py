"""Lock of a run folder, so that only one process writes to it."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_FILE = "run.lock"
"""File in a run folder that is locked, and holds the id of the process, while a run writes to the folder."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process. The system releases the lock when the process ends, whatever ends it.

    Raises ValueError if another process holds the lock.
    """
    path = folder / LOCK_FILE
    descriptor = _acquire(path)
    try:
        with suppress(OSError):  # on a full disk the error message of a second process lacks the id
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        with suppress(OSError):  # a folder that has become read-only keeps the file, which is no lock
            path.unlink()  # while it is still locked: see _acquire
        os.close(descriptor)


def _acquire(path: Path) -> int:
    """Return a descriptor of the locked file."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            # Unlike flock, lockf is not inherited by a forked worker, which may outlive a killed run.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 20).decode(errors="replace") or "unknown"
            os.close(descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise OSError(error.errno, f"{error.strerror}; choose a file system with locks", str(path)) from error
            raise ValueError(
                f"run folder {str(path.parent)!r} is in use by process {holder}; wait until it ends, or stop it"
            ) from None
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # its holder has just removed it: lock the file that others find now


def _is_at(path: Path, descriptor: int) -> bool:
    """Return True if the file of a descriptor still has this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
