"""Replacement of files that leaves a whole file at every moment, whenever a process is killed."""

import glob
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with the path of a draft beside `path`, flush the draft to disk and rename it to `path`.

    Drafts of `path` that killed processes have left are removed.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        try:
            os.kill(int(left.suffixes[-2].removeprefix(".")), 0)  # asks whether the process is there
        except ProcessLookupError:
            left.unlink(missing_ok=True)
        except (ValueError, PermissionError):
            continue
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write one file
    draft.unlink(missing_ok=True)
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def replace_durably(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Do the same as `replace_file`, with an opened draft."""

    def write_draft(draft: Path) -> None:
        with draft.open("xb") as file:
            write(file)

    replace_file(path, write_draft)


def replace_and_keep(path: Path, text: str) -> None:
    """Replace a file by `text`, with a copy of the earlier file under the first free name like `name.1.suffix`."""
    if path.is_file():
        shutil.copy2(path, free_name(path))
    replace_file(path, lambda draft: draft.write_text(text))


def set_aside(path: Path) -> None:
    """Rename a file to the first free name like `name.1.suffix`."""
    path.rename(free_name(path))


def free_name(path: Path) -> Path:
    """Return the first path like `name.1.suffix` that does not exist."""
    numbered = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    return next(other for other in numbered if not other.exists())
