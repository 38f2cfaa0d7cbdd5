"""Data files of tasks, whose size is known before they are read."""

from pathlib import Path

from esper_lightning.machine import check_memory


def check_file(path: Path, task: str, *, bytes_per_byte: int) -> None:
    """Raise ValueError if an existing file is empty or too large.

    Args:
        path: Path of the file.
        task: Name of the task, for the error message.
        bytes_per_byte: Bytes of memory that reading and converting the file takes for each of its bytes.
    """
    size = path.stat().st_size
    if size == 0:  # or without a size, like the files of /proc, some of which have no end
        raise ValueError(f"{task}: {str(path)!r} is empty; name another file")
    check_memory(
        size * bytes_per_byte, f"{task}: reading the {size} bytes of {str(path)!r} needs", "name a smaller file"
    )
