"""Where a tick's time goes: by the processor's clock, or on CUDA by events in the streams that do the work."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch

Phase = Literal[
    "data", "train", "validate", "counterfactual", "policy", "update", "governor", "bookkeeping", "telemetry"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""`data` is drawing, fetching and varying minibatches, which `train` does not hold; `counterfactual` is the part of the
validation pass that answers for combinations of seeds beside the host as it is, and `validate` the rest of it."""


class Timer(Protocol):
    """Marks moments, and says later how far apart they were."""

    name: str

    def mark(self) -> Any:
        """This moment; where a device works by itself, the moment when it gets here."""

    def passed(self, mark: Any) -> bool:
        """Has the moment come? Nobody waits for it."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one moment to another; both have passed."""


class ProcessorTimer:
    """The processor's clock."""

    name = "perf_counter"

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class EventTimer:
    """Events in whatever stream is current on a GPU: calls return before their kernels run, and no clock would see it.

    Args:
        device: The GPU.
    """

    name = "cuda_events"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1000.0


def make_timer(device: torch.device) -> Timer:
    """For work on `device`."""
    return EventTimer(device) if device.type == "cuda" else ProcessorTimer()


class Lap(NamedTuple):
    """A stretch of work on one host."""

    begin: Any
    end: Any
    shares: dict[str, float]  # by phase; they add up to 1


class Laps:
    """What the work on one host consists of, lap by lap; written by whoever works on the host, in its thread or stream.

    Args:
        timer: On the host's device.
    """

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.done: list[Lap] = []

    def start(self) -> None:
        """What follows is work on this host; what went before, since the last lap, was not."""
        self.last = self.timer.mark()

    def lap(self, **shares: float) -> None:
        """The time since `start` or the last lap belongs to these phases, in these shares."""
        now = self.timer.mark()
        self.done.append(Lap(self.last, now, shares))
        self.last = now

    def take(self) -> list[Lap]:
        """The laps since the last call."""
        taken, self.done = self.done, []
        return taken


class _Stretch(NamedTuple):
    phase: Phase
    begin: Any
    end: Any
    laps: list[tuple[Timer, Lap]]


class Gauge(Protocol):
    """Says how much memory a phase takes."""

    def begin(self) -> None:
        """A phase begins."""

    def end(self) -> float | None:
        """It is over, with so many MiB. None: nobody knows."""


class PhaseClock:
    """Adds up seconds per phase, and remembers the most memory that each took.

    Args:
        timer: Where the pool's observations live; its name says which clock it is.

    Attributes:
        gauge: Of memory, for whoever asks. None: nobody does; on a GPU it counts the peak anew with each phase.
    """

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.gauge: Gauge | None = None
        self.memory: dict[str, float] = {}  # MiB by phase, since `take_memory`
        self.seconds: Counter[str] = Counter(dict.fromkeys(PHASES, 0.0))
        self._pending: list[_Stretch] = []

    @contextmanager
    def measure(self, phase: Phase, hosts: Sequence[Laps] = ()) -> Iterator[None]:
        """The time meanwhile is `phase`'s; if `hosts` are worked on, it is divided among phases as their laps say.

        Divided, not added up: where hosts are worked on at the same time, in threads or streams, the seconds of all
        together are more than have gone by.
        """
        for laps in hosts:
            laps.take()  # somebody else's time
        if self.gauge is not None:
            self.gauge.begin()
        begin = self.timer.mark()
        yield
        if self.gauge is not None and (held := self.gauge.end()) is not None:
            self.memory[phase] = max(held, self.memory.get(phase, 0.0))
        worked = [(laps.timer, lap) for laps in hosts for lap in laps.take()]
        self._pending.append(_Stretch(phase, begin, self.timer.mark(), worked))
        self.settle()

    def settle(self) -> None:
        """Adds up what has passed, and waits for nothing: what a GPU still works on is left for the next time."""
        pending, self._pending = self._pending, []
        for stretch in pending:
            if self.timer.passed(stretch.end):
                self._add(stretch)
            else:
                self._pending.append(stretch)

    def _add(self, stretch: _Stretch) -> None:
        seconds = self.timer.seconds(stretch.begin, stretch.end)
        work: Counter[str] = Counter()
        for timer, lap in stretch.laps:
            spent = timer.seconds(lap.begin, lap.end)
            work.update({phase: share * spent for phase, share in lap.shares.items()})
        whole = work.total()
        parts = {phase: part / whole for phase, part in work.items()} if whole > 0.0 else {stretch.phase: 1.0}
        self.seconds.update({phase: part * seconds for phase, part in parts.items()})

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call; on CUDA, as far as the GPU has come."""
        self.settle()
        taken, self.seconds = dict(self.seconds), Counter(dict.fromkeys(PHASES, 0.0))
        return taken

    def take_memory(self) -> dict[str, float]:
        """MiB per phase, the most since the last call; of the phases that there were."""
        taken, self.memory = self.memory, {}
        return taken
