"""Atomic replacement of files: a draft is written beside the file, flushed to disk and renamed."""

import glob
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with the path of a draft and rename the draft to `path`: a crash leaves the earlier file intact."""
    draft = draft_of(path)
    try:
        write(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def replace_durably(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Do the same as `replace_file`, with an opened draft that is on the disk before it is renamed.

    Drafts of `path` that killed processes have left are removed first. A link at the place of the draft is not
    followed, and a link at `path` is replaced.
    """
    remove_abandoned_drafts(path)

    def write_and_flush(draft: Path) -> None:
        with draft.open("xb") as file:  # "x" fails on an existing path, so no symbolic link is followed
            write(file)
            file.flush()
            os.fsync(file.fileno())

    replace_file(path, write_and_flush)


def replace_and_keep(path: Path, text: str) -> None:
    """Replace a file by `text`, with a copy of the earlier file under the first free name like `name.1.suffix`.

    At any moment there is a whole file at `path`. Symbolic links are copied as links, so nothing that they point to is
    read or written. A folder or a pipe is renamed.
    """
    if path.is_symlink() or path.is_file():
        earlier = free_name(path)
        remove_abandoned_drafts(earlier)
        replace_file(earlier, lambda draft: shutil.copy2(path, draft, follow_symlinks=False))
    elif path.exists():
        set_aside(path)
    replace_durably(path, lambda file: file.write(text.encode()))


def set_aside(path: Path) -> None:
    """Rename an existing file at `path` to the first free name like `name.1.suffix`."""
    path.rename(free_name(path))


def free_name(path: Path) -> Path:
    """Return the first path like `name.1.suffix` that does not exist."""
    numbered = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    return next(other for other in numbered if not (other.exists() or other.is_symlink()))


def draft_of(path: Path) -> Path:
    """Return the path of the draft in which this process writes `path`; its name holds the process id."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def remove_abandoned_drafts(path: Path) -> None:
    """Remove the drafts of `path` whose process has ended; drafts of other running processes stay."""
    for draft in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        process_id = draft.name.removesuffix(".tmp").rpartition(".")[2]
        has_ended = process_id == str(os.getpid()) or not is_running(process_id)
        if has_ended and (draft.is_symlink() or draft.is_file()):
            draft.unlink(missing_ok=True)


def is_running(process_id: str) -> bool:
    """Return True if a process with this id runs on this machine."""
    try:
        os.kill(int(process_id), 0)
    except PermissionError:  # it belongs to another user
        return True
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    return True
