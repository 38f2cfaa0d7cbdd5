"""Runs are killed at random moments and resumed, and their results compared with those of an uninterrupted run.

    python -m tests.faults.kills --kills 100 --seed 0 [--executor fused|loop|threads] [--precision fp32|bf16] [--fresh]

Any other flag is passed to the run. It prints a line for every kill; exit code 1 if a run ended differently.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from signal import SIGKILL
from typing import NamedTuple

from tests.faults.programs import Program, Start, forked_starter, fresh_starter, wait_for_next_second
from tests.faults.runs import GROWING, RunResult, check_that_it_grows, differences_of, result_of, tick_of
from tests.runs import HORIZON, Run

ROLLOUTS = 4
END = ROLLOUTS * HORIZON

AIMED = 1 / 3
"""Share of kills that wait for a checkpoint to be written; a write takes a hundredth of the time between two."""

TWICE = 1 / 3
"""Share of runs that are killed once more after being resumed."""

CHECK_INTERVAL_SECONDS = 0.0002
"""Seconds between two checks for a draft, which exists for about 5 ms."""


class Reference(NamedTuple):
    """Reference run that was not killed."""

    flags: tuple[str, ...]
    seconds: float  # from the start of the first tick to the end
    checkpoint_bytes: int
    ending: RunResult


class KillMoment(NamedTuple):
    """Moment at which a run is killed."""

    seconds: float  # seconds after it has begun to train
    written: float | None  # then as soon as this share of a checkpoint's bytes is in its draft


class Kill(NamedTuple):
    """Record of one killed run."""

    seconds: float  # seconds for which it had trained
    writing: str | None  # checkpoint that it was writing
    tick: int  # tick from which it resumes; 0: from the start

    def __str__(self) -> str:
        writing = f"while {self.writing} was written" if self.writing else "between checkpoints"
        return f"killed after {self.seconds:5.3f} s {writing}, went on from tick {self.tick}"


class Trial(NamedTuple):
    """A run that was killed once or twice, and then resumed to its end."""

    kills: list[Kill]
    differences: list[str]


def flags_of(executor: str, precision: str) -> tuple[str, ...]:
    rollouts = ("--trainer.max_epochs", str(ROLLOUTS))
    return (*GROWING, *rollouts, "--data.env.executor", executor, "--data.env.training.precision", precision)


def make_reference(start: Start, flags: Sequence[str], root: Path) -> Reference:
    """Run to the end. Raises RuntimeError if the run fails, and ValueError if nothing grows in it."""
    root.mkdir()
    program = _start(start, flags, root)
    began = _wait_for_training(program, root)
    if program.ended() != 0:
        raise RuntimeError(f"the undisturbed run failed:\n{program.output.read_text()}")
    seconds = time.monotonic() - began
    run = _last_run(root)
    ending = result_of(run)
    check_that_it_grows(ending)
    return Reference(tuple(flags), seconds, run.latest.stat().st_size, ending)


def trials(start: Start, reference: Reference, root: Path, rng_seed: int, aimed: float = AIMED) -> Iterator[Trial]:
    """Kill one run after the other at random moments; runs that finish before their moment are left out."""
    for number in count():
        trial = killed_and_resumed(start, reference, root / str(number), Random(f"{rng_seed} {number}"), aimed)
        if trial.kills or trial.differences:
            yield trial


def killed_and_resumed(start: Start, reference: Reference, root: Path, chance: Random, aimed: float) -> Trial:
    """Kill one run once or twice, resume it each time, then let it finish."""
    root.mkdir()
    kills: list[Kill] = []
    tick = 0
    planned = 2 if chance.random() < TWICE else 1
    while True:
        aim = _draw_moment(chance, reference.seconds * (1 - tick / END), aimed) if len(kills) < planned else None
        latest = _last_run(root).latest if tick else None
        program = _start(start, reference.flags, root, latest)
        began = _wait_for_training(program, root)
        if aim is None or not (kill := _kill_at(program, root, began, aim, reference.checkpoint_bytes)):
            break
        kills.append(kill)
        tick = kill.tick
    if program.ended() != 0:
        return Trial(kills, [f"it failed:\n{program.output.read_text()}"])
    ending = result_of(_last_run(root))
    return Trial(kills, differences_of(ending, reference.ending))


def _draw_moment(chance: Random, seconds: float, aimed: float) -> KillMoment:
    """Draw a moment within the time that a run still needs."""
    return KillMoment(chance.uniform(0.0, seconds), chance.random() if chance.random() < aimed else None)


def _kill_at(program: Program, root: Path, began: float, aim: KillMoment, checkpoint_bytes: int) -> Kill | None:
    """Kill the run at its moment. None: it ended before."""
    drafts = f"*/checkpoints/.*.{program.pid}.tmp"
    program.wait(began + aim.seconds - time.monotonic())
    if aim.written is not None:
        enough = aim.written * checkpoint_bytes
        while program.wait(CHECK_INTERVAL_SECONDS) is None and not any(
            _size(draft) >= enough for draft in root.glob(drafts)
        ):
            pass
    if program.wait(0.0) is not None:
        return None
    program.send(SIGKILL)
    seconds = time.monotonic() - began
    if program.ended() != -SIGKILL:
        return None
    writing = [draft.name.removeprefix(".").split(f".{program.pid}.")[0] for draft in root.glob(drafts)]
    latest = _last_run(root).latest
    tick = tick_of(latest) if latest.exists() else 0
    return Kill(seconds, writing[0] if writing else None, tick)


def _size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _start(start: Start, flags: Sequence[str], root: Path, checkpoint: Path | None = None) -> Program:
    go_on = ("--ckpt_path", str(checkpoint)) if checkpoint else ()
    wait_for_next_second(root)
    return start([*flags, "--trainer.default_root_dir", str(root), *go_on], root / "output.txt")


def _wait_for_training(program: Program, root: Path) -> float:
    """Wait until training begins and return the time: Lightning opens TensorBoard's file right before."""
    while program.wait(0.002) is None:
        if any(root.glob(f"*/events.out.tfevents.*.{program.pid}.*")):
            return time.monotonic()
    raise RuntimeError(f"ended before it trained:\n{program.output.read_text()}")


def _last_run(root: Path) -> Run:
    """Return the latest run below `root`: one that was killed before its first checkpoint was started again."""
    return Run(max(root.glob("version_*"), key=lambda folder: int(folder.name.removeprefix("version_"))))


def report(trial: Trial, number: int) -> None:
    """Print a line for every kill of a trial, and any differences."""
    verdict = "equal" if not trial.differences else "DIFFERENT"
    for kill in trial.kills:
        print(f"{number:4d}  {kill}: {verdict}", flush=True)
        number += 1
    for difference in trial.differences[:8]:
        print(f"      {difference}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="how many, at least")
    parser.add_argument("--seed", type=int, default=0, help="decides when")
    parser.add_argument("--executor", choices=("fused", "loop", "threads"), default="fused")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--fresh", action="store_true", help="a new interpreter for every run, as users start them")
    args, others = parser.parse_known_args()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # a resumed run warns of the points that it replaces

    kills = equal = writing = 0
    with (fresh_starter if args.fresh else forked_starter)() as start, tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        reference = make_reference(start, (*flags_of(args.executor, args.precision), *others), root / "untouched")
        for trial in trials(start, reference, root, args.seed):
            report(trial, kills + 1)
            kills += len(trial.kills)
            equal += len(trial.kills) if not trial.differences else 0
            writing += sum(kill.writing is not None for kill in trial.kills)
            if kills >= args.kills:
                break
    print(f"{equal} of {kills} equal, {writing} of them while a checkpoint was written")
    raise SystemExit(equal < kills)


if __name__ == "__main__":
    main()
