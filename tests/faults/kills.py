"""Runs are killed at random moments and resumed, and their ends compared with that of a run nobody touched.

    python -m tests.faults.kills --kills 100 --seed 0 [--executor fused|loop|threads] [--precision fp32|bf16] [--fresh]

Any other flag is one of the run's. A line for every kill; exit code 1 if a run did not end as it should have.
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

from tests.faults.programs import Program, Start, forked, fresh, wait_for_next_second
from tests.faults.runs import GROWING, Ending, check_that_it_grows, differences_of, ending_of, tick_of
from tests.runs import HORIZON, Run

ROLLOUTS = 4
END = ROLLOUTS * HORIZON

AIMED = 1 / 3
"""Share of kills that wait for a checkpoint to be written; a write takes a hundredth of the time between two."""

TWICE = 1 / 3
"""Share of runs that are killed once more after they went on."""

GLANCE = 0.0002
"""Seconds between two looks for a draft, which is there for some 5 ms."""


class Reference(NamedTuple):
    """The run that nobody touched."""

    flags: tuple[str, ...]
    seconds: float  # from the first tick's beginning to the end
    checkpoint_bytes: int
    ending: Ending


class Aim(NamedTuple):
    """When a run is to be killed."""

    seconds: float  # after it has begun to train
    written: float | None  # and then as soon as this share of a checkpoint's bytes is in its draft


class Kill(NamedTuple):
    """A run that was killed."""

    seconds: float  # for which it had trained
    writing: str | None  # the checkpoint that it was writing
    tick: int  # it goes on from; 0: from the beginning

    def __str__(self) -> str:
        writing = f"while {self.writing} was written" if self.writing else "between checkpoints"
        return f"killed after {self.seconds:5.3f} s {writing}, went on from tick {self.tick}"


class Trial(NamedTuple):
    """A run that was killed, perhaps more than once, and then left to finish."""

    kills: list[Kill]
    differences: list[str]


def flags_of(executor: str, precision: str) -> tuple[str, ...]:
    rollouts = ("--trainer.max_epochs", str(ROLLOUTS))
    return (*GROWING, *rollouts, "--data.env.executor", executor, "--data.env.training.precision", precision)


def untouched(start: Start, flags: Sequence[str], root: Path) -> Reference:
    """Lets a run finish. Raises RuntimeError if that does not go well, and ValueError if nothing grows in it."""
    root.mkdir()
    program = _start(start, flags, root)
    began = _begins_to_train(program, root)
    if program.ended() != 0:
        raise RuntimeError(f"the run that nobody touched failed:\n{program.output.read_text()}")
    seconds = time.monotonic() - began
    run = _last_run(root)
    ending = ending_of(run)
    check_that_it_grows(ending)
    return Reference(tuple(flags), seconds, run.latest.stat().st_size, ending)


def trials(start: Start, reference: Reference, root: Path, seed: int, aimed: float = AIMED) -> Iterator[Trial]:
    """One run after the other, killed by chance. Runs that finish before their moment has come are left out."""
    for number in count():
        trial = killed_and_resumed(start, reference, root / str(number), Random(f"{seed} {number}"), aimed)
        if trial.kills or trial.differences:
            yield trial


def killed_and_resumed(start: Start, reference: Reference, root: Path, chance: Random, aimed: float) -> Trial:
    """One run: killed once or twice, resumed each time, then left to finish."""
    root.mkdir()
    kills: list[Kill] = []
    tick = 0
    planned = 2 if chance.random() < TWICE else 1
    while True:
        aim = _aim(chance, reference.seconds * (1 - tick / END), aimed) if len(kills) < planned else None
        latest = _last_run(root).latest if tick else None
        program = _start(start, reference.flags, root, latest)
        began = _begins_to_train(program, root)
        if aim is None or not (kill := _killed(program, root, began, aim, reference.checkpoint_bytes)):
            break
        kills.append(kill)
        tick = kill.tick
    if program.ended() != 0:
        return Trial(kills, [f"it failed:\n{program.output.read_text()}"])
    ending = ending_of(_last_run(root))
    return Trial(kills, differences_of(ending, reference.ending))


def _aim(chance: Random, seconds: float, aimed: float) -> Aim:
    """A moment within the time that a run still needs."""
    return Aim(chance.uniform(0.0, seconds), chance.random() if chance.random() < aimed else None)


def _killed(program: Program, root: Path, began: float, aim: Aim, checkpoint_bytes: int) -> Kill | None:
    """Kills it when the time has come. None: it ended before."""
    drafts = f"*/checkpoints/.*.{program.pid}.tmp"
    program.wait(began + aim.seconds - time.monotonic())
    if aim.written is not None:
        enough = aim.written * checkpoint_bytes
        while program.wait(GLANCE) is None and not any(_size(draft) >= enough for draft in root.glob(drafts)):
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
    """0 if it is no longer there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _start(start: Start, flags: Sequence[str], root: Path, checkpoint: Path | None = None) -> Program:
    go_on = ("--ckpt_path", str(checkpoint)) if checkpoint else ()
    wait_for_next_second(root)
    return start([*flags, "--trainer.default_root_dir", str(root), *go_on], root / "output.txt")


def _begins_to_train(program: Program, root: Path) -> float:
    """Waits for it, and says when: Lightning opens the file of TensorBoard's points right before."""
    while program.wait(0.002) is None:
        if any(root.glob(f"*/events.out.tfevents.*.{program.pid}.*")):
            return time.monotonic()
    raise RuntimeError(f"ended before it trained:\n{program.output.read_text()}")


def _last_run(root: Path) -> Run:
    """A run that was killed before it had a checkpoint is begun anew, in a folder of its own."""
    return Run(max(root.glob("version_*"), key=lambda folder: int(folder.name.removeprefix("version_"))))


def report(trial: Trial, number: int) -> None:
    """A line for every kill of a trial, and what differs."""
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
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of the points that a resumed run replaces

    kills = equal = writing = 0
    with (fresh if args.fresh else forked)() as start, tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        reference = untouched(start, (*flags_of(args.executor, args.precision), *others), root / "untouched")
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
