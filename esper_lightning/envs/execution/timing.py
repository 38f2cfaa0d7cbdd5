"""Time per phase of an environment step, by the processor's clock, or on CUDA by events in the working streams."""

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
"""Names of all phases.

`data` is drawing, fetching and augmenting minibatches, and is not part of `train`. `counterfactual` is the share of the
validation pass spent on combinations of seeds other than all seeds, and `validate` the rest of the pass."""


class Timer(Protocol):
    """Source of time marks: marks are taken now and read later."""

    name: str

    def mark(self) -> Any:
        """Return a mark of the present moment; on an asynchronous device, of the moment when its queue gets here."""

    def passed(self, mark: Any) -> bool:
        """Return whether the device has reached the mark, without waiting."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks, both of which the device has reached."""


class ProcessorTimer:
    """Timer that reads the processor's clock."""

    name = "perf_counter"

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class EventTimer:
    """Timer that records events in the current stream of a GPU, since calls return before their kernels run.

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
    """Return the timer for work on `device`."""
    return EventTimer(device) if device.type == "cuda" else ProcessorTimer()


class Lap(NamedTuple):
    """An interval of work on one host."""

    begin: Any  # mark of the timer
    end: Any  # mark of the timer
    shares: dict[str, float]  # fraction of the interval by phase; the fractions sum to 1


class Laps:
    """Intervals of work on one host, recorded in the thread or stream that does the work.

    Args:
        timer: Timer of the host's device.
    """

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.done: list[Lap] = []

    def start(self) -> None:
        """Begin an interval; the time since the last one was not work on this host."""
        self.last = self.timer.mark()

    def lap(self, **shares: float) -> None:
        """End the interval, attribute it to phases in these shares, and begin the next interval."""
        now = self.timer.mark()
        self.done.append(Lap(self.last, now, shares))
        self.last = now

    def take(self) -> list[Lap]:
        """Return the intervals since the last call, and forget them."""
        taken, self.done = self.done, []
        return taken


class _Stretch(NamedTuple):
    phase: Phase
    begin: Any
    end: Any
    laps: list[tuple[Timer, Lap]]


class Gauge(Protocol):
    """Measures the peak memory of a phase."""

    def begin(self) -> None:
        """Begin a phase."""

    def end(self) -> float | None:
        """End the phase. Returns its peak memory in MiB, or None if unknown."""


class PhaseClock:
    """Sums seconds and records the peak memory of each phase.

    Args:
        timer: Timer of the device of the pool's observations.

    Attributes:
        memory_probe: Measures memory; on a GPU it resets the peak counter with each phase. None: memory is not
            measured.
    """

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.gauge: Gauge | None = None
        self.memory: dict[str, float] = {}  # peak MiB by phase since the last `take_memory`
        self.seconds: Counter[str] = Counter(dict.fromkeys(PHASES, 0.0))
        self._pending: list[_Stretch] = []

    @contextmanager
    def measure(self, phase: Phase, hosts: Sequence[Laps] = ()) -> Iterator[None]:
        """Attribute the time within the context to `phase`, or to the phases of the intervals of `host_timers`.

        The elapsed time is divided in proportion to the intervals. Their sum would exceed it where threads or streams
        work on several hosts at the same time.
        """
        for laps in hosts:
            laps.take()  # drops intervals from before this context
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
        """Sum the measurements that are complete, without waiting: unfinished GPU work is left for the next call."""
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
        """Return seconds per phase since the last call; on CUDA, of the work that the GPU has finished."""
        self.settle()
        taken, self.seconds = dict(self.seconds), Counter(dict.fromkeys(PHASES, 0.0))
        return taken

    def take_memory(self) -> dict[str, float]:
        """Return the peak memory in MiB since the last call, for each phase that has run."""
        taken, self.memory = self.memory, {}
        return taken
