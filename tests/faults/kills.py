"""Runs are killed twice at random moments, resumed, and their results compared with those of an uninterrupted run.

    python -m tests.faults.kills --kills 100 --seed 0 [--executor fused|loop|threads] [--precision fp32|bf16] [--fresh]

Half of the kills are aimed: at a checkpoint in writing, or at the record of a run (config.yaml, run.json, events.jsonl)
while it is replaced. Any other flag is passed to the run. It prints a line for every kill, and a table at the end; exit
code 1 if a run ended differently.
"""

import argparse
import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from signal import SIGKILL
from typing import Any, NamedTuple

import yaml

from esper_lightning.callbacks.telemetry import EVENTS_FILE
from esper_lightning.checkpointing.run_lock import LOCK_FILE
from tests.faults.programs import Program, Start, forked_starter, fresh_starter, wait_for_next_second
from tests.faults.runs import GROWING, RunResult, check_that_it_grows, differences_of, result_of, tick_of
from tests.runs import HORIZON, Run, differences

ROLLOUTS = 4
END = ROLLOUTS * HORIZON

AIMED = 1 / 2
"""Share of kills that wait for files to be written; writing a checkpoint takes a hundredth of the time between two."""

CRASHES = 2
"""Number of times that each run is killed: again after it has been resumed, or begun anew."""

RECORD_SECONDS = 0.1
"""Time from the first change of the record in which its other files are replaced; mostly 0.03 s."""

CHECK_INTERVAL_SECONDS = 0.0002
"""Seconds between two checks for a draft, which exists for about 5 ms."""


class Reference(NamedTuple):
    """Reference run that was not killed."""

    flags: tuple[str, ...]
    seconds: float  # from the start of the first tick to the end
    checkpoint_bytes: int
    ending: RunResult
    record: dict[str, Any]


class KillMoment(NamedTuple):
    """Moment at which a run is killed."""

    seconds: float  # seconds after it has begun to train, or after it has begun to replace its record
    written: float | None  # then as soon as this share of a checkpoint's bytes is in its draft
    record: bool  # count the seconds from the first change of the record


class Kill(NamedTuple):
    """Record of one killed run."""

    seconds: float  # seconds for which it had trained
    writing: str | None  # file that it was writing
    record: bool  # it was replacing its record
    tick: int  # tick from which it resumes; 0: from the start
    crash: int  # 1: the run's first crash, 2: its second one

    @property
    def moment(self) -> str:
        """Kind of moment, for the table."""
        if self.record:
            return f"record: {self.writing} was a draft" if self.writing else "record: between its files"
        return "checkpoint in writing" if self.writing else "between two files"

    def __str__(self) -> str:
        writing = f"while {self.writing} was written" if self.writing else "between two files"
        if self.record:
            writing += " of its record"
        return f"killed after {self.seconds:5.3f} s {writing}, went on from tick {self.tick}"


class Trial(NamedTuple):
    """A run that was killed twice, unless it was too fast, and then resumed to its end."""

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
    return Reference(tuple(flags), seconds, run.latest.stat().st_size, ending, record_of(run))


def record_of(run: Run) -> dict[str, Any]:
    """Return what config.yaml and run.json hold, without the folder and the command, which differ between runs."""
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    config["trainer"].pop("default_root_dir")
    written = json.loads((run.folder / "run.json").read_text())
    written.pop("command")
    return {"config": config, "run": written}


def trials(start: Start, reference: Reference, root: Path, rng_seed: int, aimed: float = AIMED) -> Iterator[Trial]:
    """Kill one run after the other at random moments; runs that finish before their moment are left out."""
    for number in count():
        trial = killed_and_resumed(start, reference, root / str(number), Random(f"{rng_seed} {number}"), aimed)
        if trial.kills or trial.differences:
            yield trial


def killed_and_resumed(start: Start, reference: Reference, root: Path, chance: Random, aimed: float) -> Trial:
    """Kill one run twice, resume it each time, then let it finish."""
    root.mkdir()
    kills: list[Kill] = []
    tick = 0
    while True:
        aim = _draw_moment(chance, reference.seconds * (1 - tick / END), aimed) if len(kills) < CRASHES else None
        latest = _last_run(root).latest if tick else None
        program = _start(start, reference.flags, root, latest)
        began = _wait_for_training(program, root)
        if aim is None or not (kill := _kill_at(program, root, began, aim, reference.checkpoint_bytes, len(kills) + 1)):
            break
        kills.append(kill)
        tick = kill.tick
    if (status := program.ended()) != 0:
        return Trial(kills, [f"it failed with exit status {status}:\n{program.output.read_text()}"])
    run = _last_run(root)
    found = differences_of(result_of(run), reference.ending) + differences(record_of(run), reference.record, "record")
    left = [path.name for path in run.folder.rglob("*") if path.name == LOCK_FILE or path.suffix == ".tmp"]
    return Trial(kills, [*found, *(f"{name} was left" for name in left)])


def _draw_moment(chance: Random, seconds: float, aimed: float) -> KillMoment:
    """Draw a moment within the time that a run still needs, or within that of writing a checkpoint or the record."""
    if chance.random() >= aimed:
        return KillMoment(chance.uniform(0.0, seconds), written=None, record=False)
    if chance.random() < 0.5:
        return KillMoment(chance.uniform(0.0, RECORD_SECONDS), written=None, record=True)
    return KillMoment(chance.uniform(0.0, seconds), written=chance.random(), record=False)


def _kill_at(
    program: Program, root: Path, began: float, aim: KillMoment, checkpoint_bytes: int, crash: int
) -> Kill | None:
    """Kill the run at its moment. None: it ended before."""
    drafts = f"*/checkpoints/.*.{program.pid}.tmp"
    if aim.record:
        began = _wait_for_record(program, root)
    program.wait(max(0.0, began + aim.seconds - time.monotonic()))
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
    left = [*root.glob(drafts), *root.glob(f"*/.*.{program.pid}.tmp")]
    writing = [draft.name.removeprefix(".").split(f".{program.pid}.")[0] for draft in left]
    latest = _last_run(root).latest
    tick = tick_of(latest) if latest.exists() else 0
    return Kill(seconds, writing[0] if writing else None, aim.record, tick, crash)


def _wait_for_record(program: Program, root: Path) -> float:
    """Wait until the run begins to replace its record, and return the time."""
    before = _record_state(root)
    while program.wait(CHECK_INTERVAL_SECONDS) is None:
        if any(root.glob(f"*/.config.*{program.pid}.tmp")) or _record_state(root) != before:
            break
    return time.monotonic()


def _record_state(root: Path) -> set[tuple[int, int]]:
    """Return inode and size of the configs and events below `root`: a replaced file has another inode."""
    stats = [path.stat() for name in ("config*.yaml", EVENTS_FILE) for path in root.glob(f"*/{name}")]
    return {(stat.st_ino, stat.st_size) for stat in stats}


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


def print_table(kills: Sequence[tuple[Kill, bool]]) -> None:
    """Print the number of kills by moment, and of those whose run ended equal."""
    moments = Counter(kill.moment for kill, _ in kills)
    equal = Counter(kill.moment for kill, is_equal in kills if is_equal)
    print(f"\n{'moment':42}  kills  equal")
    for moment, count_of_kills in sorted(moments.items()):
        print(f"{moment:42}  {count_of_kills:5d}  {equal[moment]:5d}")
    print(f"{'all':42}  {len(kills):5d}  {sum(equal.values()):5d}")
    second = sum(kill.crash > 1 for kill, _ in kills)
    anew = sum(kill.tick == 0 for kill, _ in kills)
    print(f"{second} of them were the second crash of a run; after {anew} there was no checkpoint, so it began again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="how many, at least")
    parser.add_argument("--seed", type=int, default=0, help="decides when")
    parser.add_argument("--executor", choices=("fused", "loop", "threads"), default="fused")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--fresh", action="store_true", help="a new interpreter for every run, as users start them")
    args, others = parser.parse_known_args()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # a resumed run warns of the points that it replaces

    kills: list[tuple[Kill, bool]] = []  # with True if the run ended equal
    began = time.monotonic()
    with (fresh_starter if args.fresh else forked_starter)() as start, tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        reference = make_reference(start, (*flags_of(args.executor, args.precision), *others), root / "untouched")
        for trial in trials(start, reference, root, args.seed):
            report(trial, len(kills) + 1)
            kills += [(kill, not trial.differences) for kill in trial.kills]
            if len(kills) >= args.kills:
                break
    print_table(kills)
    print(f"{(time.monotonic() - began) / len(kills):.1f} s for each kill")
    raise SystemExit(not all(is_equal for _, is_equal in kills))


if __name__ == "__main__":
    main()
