"""Events of a run as typed records: one line of JSON each in `events.jsonl`, in the run's folder.

docs/reference/telemetry.md describes every record; contributions are in points (of 100). A number that is not
finite becomes null, since JSON has none.
"""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from esper_lightning.envs import HostVerdict, HostVeto
from esper_lightning.growth import SeedEvent, Stage

SCHEMA = 5
"""Version of the records' format; raised whenever a reader of the old format cannot read the new one."""

EVENTS_FILE = "events.jsonl"
"""Name of the file of events in the run's folder."""

STACK_FILE = "stack.jsonl"
"""Name of the file of the callback `Stack`, whose ticks are optimizer steps."""


class Started(NamedTuple):
    """A process started to train, or resumed a run."""

    tick: int
    schema: int
    hosts: int
    horizon: int
    slots: list[str]
    blueprints: list[str]
    score: str  # name of the score, or of the monitored metric; empty: none
    flops: int  # of the first host's forward pass for one sample, without seeds
    behind: dict[str, int]  # those behind each slot, in the order in which data pass


class HostsMeasured(NamedTuple):
    """Measurements of all hosts after one tick, with their blended seeds: columns with one value for each host."""

    tick: int
    op: list[str]  # carried out before the tick
    score: list[float | None]
    loss: list[float | None]
    objective: list[float | None]
    parameters: list[int]  # with the fossilized seeds


class Validated(NamedTuple):
    """A validation of a network that `Grow` or `Stack` grows."""

    tick: int  # of `Grow`; for `Stack` optimizer steps
    step: int  # optimizer steps
    parameters: int
    flops: float  # of training so far
    seconds: float  # of wall-clock time since the process began to train
    metrics: dict[str, float | None]  # all that was logged


class Stacked(NamedTuple):
    """A list of blocks has grown."""

    tick: int  # optimizer steps
    blocks: str
    before: int
    after: int
    parameters: int  # of the module before


class GateRefused(NamedTuple):
    """A gate has closed a seed's way to its next stage, or still does at the first tick of an episode."""

    tick: int
    host: int
    slot: str
    blueprint: str
    stage: Stage  # refused
    reasons: list[str]


class Contributed(NamedTuple):
    """Contributions of all blended seeds of all hosts in one tick, as three columns of equal length."""

    tick: int
    host: list[int]
    slot: list[str]
    points: list[float | None]


class Updated(NamedTuple):
    """A PPO update, with the metrics that TensorBoard shows under `train/`."""

    tick: int
    update: int
    metrics: dict[str, float | None]


class AnomalyChanged(NamedTuple):
    """An anomaly was raised or cleared."""

    tick: int
    update: int
    name: str
    level: str  # `raised` or `cleared`
    value: float | None
    threshold: float
    cause: str
    settings: list[str]

    def __str__(self) -> str:
        """Return `anomaly kl: raised at update 7: 0.13, bound 0.1: updates are too large; look at model.ppo.lr`."""
        line = (
            f"anomaly {self.name}: {self.level} at update {self.update}: {self.value:.3g}, bound {self.threshold:.3g}"
        )
        return line if self.level == "cleared" else f"{line}: {self.cause}; look at {', '.join(self.settings)}"


GrowthEvent = SeedEvent | GateRefused | Contributed | Stacked | HostVerdict | HostVeto
Event = GrowthEvent | Started | HostsMeasured | Validated | Updated | AnomalyChanged

EVENT_CLASSES: dict[str, type[Event]] = {
    "started": Started,
    "hosts": HostsMeasured,
    "validation": Validated,
    "stack": Stacked,
    "seed": SeedEvent,
    "gate": GateRefused,
    "contributions": Contributed,
    "rollback": HostVerdict,
    "veto": HostVeto,
    "update": Updated,
    "anomaly": AnomalyChanged,
}
"""Class of event by the `type` of a line."""

EVENT_NAMES = {kind: name for name, kind in EVENT_CLASSES.items()}


def to_plain(value: Any) -> Any:
    """Return the value as JSON has it: None in place of every float that is not finite, and the names of stages."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Stage):
        return value.name
    if isinstance(value, dict):
        return {key: to_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(part) for part in value]
    return value


def to_line(event: Event) -> str:
    """Return the event as one line of JSON: `{"type": "seed", "tick": 3, …}`."""
    fields = {"type": EVENT_NAMES[type(event)], "tick": event.tick, **event._asdict()}
    return json.dumps(to_plain(fields), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a run, finished or not: a last line that is still being written is left out.

    Raises ValueError if any other line holds no event.
    """
    for _, event in _read_lines(path):
        yield event


def _read_lines(path: Path) -> Iterator[tuple[bytes, Event]]:
    """Yield each complete line of a file of events with its event."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                fields = json.loads(line.decode())
                kind = EVENT_CLASSES.get(fields.pop("type", "")) if isinstance(fields, dict) else None
                if kind is Started and fields.get("schema") != SCHEMA:
                    schema = fields.get("schema")
                    raise ValueError(f"events of schema {schema}; use the version of this package that wrote them")
                if kind is None or set(fields) != set(kind._fields):
                    raise ValueError(f"no event of schema {SCHEMA}: {line.decode().strip():.80}")
                stages = [name for name, hint in kind.__annotations__.items() if hint is Stage]
                fields |= {name: Stage[fields[name]] for name in stages}
            except (ValueError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield line, kind(**fields)


class EventLog:
    """Writes events to a file without buffering: they survive a crash of the process once `write` has returned.

    Args:
        path: File to append to; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def discard_after(self, tick: int) -> None:
        """Truncate the file after the events of `tick`, for a run that resumes there; drop an incomplete last line.

        Raises ValueError, and leaves the file as it is, if a line that would stay holds no event.
        """
        if not self.path.exists():
            return
        length = 0  # in bytes
        for line, event in _read_lines(self.path):
            if event.tick > tick:
                break
            length += len(line)
        with self.path.open("r+b") as file:
            file.truncate(length)

    def write(self, events: Iterable[Event]) -> None:
        """Append all events in one piece, so that a reader hardly ever sees an incomplete line."""
        lines = memoryview("".join(map(to_line, events)).encode())
        if not lines:
            return
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        while lines:  # a full disk may accept only a part of the bytes
            lines = lines[self._file.write(lines) :]

    def close(self) -> None:
        """Close the file; the next event opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
