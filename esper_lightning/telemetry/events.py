"""What happened in a run, as typed records: one line of JSON each in `events.jsonl`, in the run's folder.

docs/reference/events.md describes every record. A number that is not finite is null, for JSON has none.
"""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

SCHEMA = 1
"""Of the records: raised whenever a reader of the old ones would not understand the new ones."""


class Started(NamedTuple):
    """A process began to train, or went on with a run."""

    tick: int
    schema: int
    hosts: int
    horizon: int
    slots: list[str]
    blueprints: list[str]
    level: str


class SeedChanged(NamedTuple):
    """A seed went from one stage to another, or its alpha was sent elsewhere: then both are the same."""

    tick: int
    host: int
    slot: str
    blueprint: str
    before: str
    after: str
    cause: str
    age: int
    """Host epochs since it was germinated."""
    contribution: float | None
    """Accuracy points (of 100) as last measured, also in this tick; null: never, or while it fades."""


class GateRefused(NamedTuple):
    """A gate keeps a seed from its next stage, for the first time since it came where it is."""

    tick: int
    host: int
    slot: str
    blueprint: str
    stage: str
    """That it is kept from."""
    reasons: list[str]


class Contributed(NamedTuple):
    """What all seeds that are part of a host contributed in a tick, in three columns."""

    tick: int
    host: list[int]
    slot: list[str]
    points: list[float | None]
    """Accuracy points (of 100)."""


class SeedCredited(NamedTuple):
    """What a seed that was kept is worth at the end of an episode, in accuracy points (of 100) on validation data."""

    tick: int
    host: int
    slot: str
    blueprint: str
    shapley: float
    """Its share of what all kept seeds together add."""
    interaction: float | None
    """Sum of its interactions with the other ones; null: too many to know."""


class RolledBack(NamedTuple):
    """The Governor gave a host its last good state back, or gave it up."""

    tick: int
    host: int
    seed: int
    decision: str
    cause: str
    restored: int | None
    """Tick of the episode that the host was brought back to."""


class Vetoed(NamedTuple):
    """The Governor refused an action: the host waited instead."""

    tick: int
    host: int
    action: str
    reasons: list[str]


class Updated(NamedTuple):
    """A PPO update, with what is under `train/` in TensorBoard."""

    tick: int
    update: int
    metrics: dict[str, float | None]


class AnomalyChanged(NamedTuple):
    """An anomaly was raised or cleared."""

    tick: int
    update: int
    name: str
    level: str
    value: float | None
    threshold: float
    cause: str
    settings: list[str]


class LevelChanged(NamedTuple):
    """Telemetry looks closer from now on, or no longer."""

    tick: int
    level: str
    cause: str


class CheckpointSaved(NamedTuple):
    """A checkpoint is on the disk, whole."""

    tick: int
    path: str
    """Within the run's folder, if it is there."""
    seconds: float
    """That writing took."""


Event = (
    Started
    | SeedChanged
    | GateRefused
    | Contributed
    | SeedCredited
    | RolledBack
    | Vetoed
    | Updated
    | AnomalyChanged
    | LevelChanged
    | CheckpointSaved
)

KINDS: dict[str, type[Event]] = {
    "started": Started,
    "seed": SeedChanged,
    "gate": GateRefused,
    "contributions": Contributed,
    "credit": SeedCredited,
    "rollback": RolledBack,
    "veto": Vetoed,
    "update": Updated,
    "anomaly": AnomalyChanged,
    "level": LevelChanged,
    "checkpoint": CheckpointSaved,
}
"""By the `type` of a line."""

TYPES = {kind: name for name, kind in KINDS.items()}


def finite(value: Any) -> Any:
    """The same with None for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


def to_line(event: Event) -> str:
    """`{"type": "seed", "tick": 3, …}`"""
    fields = {"type": TYPES[type(event)], **event._asdict()}
    return json.dumps(finite(fields), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def from_line(line: str) -> Event:
    """The event that a line holds. Raises ValueError if it holds none of this schema."""
    fields = json.loads(line)
    if not isinstance(fields, dict) or fields.get("type") not in KINDS:
        raise ValueError(f"no event of schema {SCHEMA}: {line!r:.80}")
    kind = KINDS[fields.pop("type")]
    if set(fields) != set(kind._fields):
        raise ValueError(f"no event of schema {SCHEMA}: {line!r:.80} has not the fields {', '.join(kind._fields)}")
    if kind is Started and fields["schema"] != SCHEMA:
        raise ValueError(
            f"events of schema {fields['schema']}, but this version reads {SCHEMA}; use the one they are of"
        )
    return kind(**fields)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a run, also of one that goes on: a last line that is not finished yet is left out.

    Raises ValueError if another line holds no event.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield from_line(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


class EventLog:
    """Writes events to a file. They are in it when `write` returns, whatever becomes of the process.

    Args:
        path: Of the file; its folder is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def go_on(self, tick: int) -> None:
        """Forgets what was written after `tick`, for a run that goes on from there, and what is not a whole line.

        Raises ValueError, and leaves the file as it is, if a line holds no event.
        """
        if not self.path.exists():
            return
        kept = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    event = from_line(line.decode())
                except ValueError as error:
                    raise ValueError(f"{self.path}, line {number}: {error}") from error
                if event.tick > tick:
                    break
                kept += len(line)
        with self.path.open("r+b") as file:
            file.truncate(kept)

    def write(self, events: Iterable[Event]) -> None:
        """Appends all of them in one piece: a reader never meets half a tick's line for long."""
        lines = memoryview("".join(map(to_line, events)).encode())
        if not lines:
            return
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        while lines:  # a disk may take a part, and refuse the rest
            lines = lines[self._file.write(lines) :]

    def close(self) -> None:
        """Lets go of the file; the next event opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
