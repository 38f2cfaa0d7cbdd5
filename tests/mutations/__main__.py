"""Puts every defect of the table into a copy of the project and prints those that no test notices.

`python -m tests.mutations` goes through the whole table; `python -m tests.mutations F6 governor` through the defects
with one of these words in their name, file or test.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue

from tests.mutations.defect import PASSED, Defect, copy_project, survives
from tests.mutations.forks import Forks, forks
from tests.mutations.table import DEFECTS


def chosen(words: Sequence[str]) -> list[Defect]:
    """Defects with one of `words` in their name, file or test; all of them without words."""
    return [d for d in DEFECTS if not words or any(word in part for word in words for part in (d.name, d.file, d.test))]


def survivors(defects: Sequence[Defect], folder: Path, jobs: int) -> list[Defect]:
    """Tries `defects` in `jobs` copies below `folder` and returns those that no test notices."""
    with ExitStack() as running:
        places: Queue[tuple[Path, Forks]] = Queue()
        for job in range(jobs):
            places.put((copy_project(folder / f"copy{job}"), running.enter_context(forks())))

        def lives(defect: Defect) -> bool:
            place = places.get()
            try:
                lived = survives(defect, *place)
            finally:
                places.put(place)
            print("SURVIVES" if lived else "caught  ", defect.name, flush=True)
            return lived

        with ThreadPoolExecutor(jobs) as pool:
            return [defect for defect, lived in zip(defects, pool.map(lives, defects), strict=True) if lived]


def check_sound(defects: Sequence[Defect], folder: Path) -> None:
    """Ends the program if a test that `defects` name fails on the unchanged code."""
    output = folder / "sound.txt"
    with forks() as running:
        code = running.run(copy_project(folder / "sound"), output, *sorted({defect.test for defect in defects}))
    if code != PASSED:
        raise SystemExit(f"error: the named tests must pass on the unchanged code:\n{output.read_text()[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="try only defects with one of these in their name, file or test")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies that are tried at the same time")
    parser.add_argument("--trust", action="store_true", help="do not run the named tests on the unchanged code first")
    asked = parser.parse_args()
    defects = chosen(asked.words)
    with tempfile.TemporaryDirectory() as folder:
        if not asked.trust:
            check_sound(defects, Path(folder))
        lived = survivors(defects, Path(folder), asked.jobs)
    print(f"{len(defects)} defects, {len(lived)} survive")
    for defect in lived:
        print(f"{defect.name}\n    {defect.file}: {defect.text!r} -> {defect.replacement!r}\n    {defect.test}")
    raise SystemExit(bool(lived))


if __name__ == "__main__":
    main()
