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

    def has_passed(self, mark: Any) -> bool:
        """Return whether the device has reached the mark, without waiting."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks, both of which the device has reached."""
        ...


class ProcessorTimer:
    """Timer that reads the processor's clock."""

    name = "perf_counter"

    def mark(self) -> float:
        return time.perf_counter()

    def has_passed(self, mark: float) -> bool:
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

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1000.0


def make_timer(device: torch.device) -> Timer:
    """Return the timer for work on `device`.

    On Apple's `mps` it is the processor's clock, without waiting for the GPU: a phase takes the time in which its work
    is queued, and the time of the work itself goes to the phase that next waits for a result.
    """
    return EventTimer(device) if device.type == "cuda" else ProcessorTimer()


class TimedInterval(NamedTuple):
    """An interval of work on one host."""

    begin: Any  # mark of the timer
    end: Any  # mark of the timer
    shares: dict[str, float]  # fraction of the interval by phase; the fractions sum to 1


class HostTimer:
    """Intervals of work on one host, recorded in the thread or stream that does the work.

    Args:
        timer: Timer of the host's device.
    """

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.intervals: list[TimedInterval] = []

    def start(self) -> None:
        """Begin an interval; the time since the last one was not work on this host."""
        self.last_mark = self.timer.mark()

    def record(self, **shares: float) -> None:
        """End the interval, attribute it to phases in these shares, and begin the next interval."""
        now = self.timer.mark()
        self.intervals.append(TimedInterval(self.last_mark, now, shares))
        self.last_mark = now

    def take_intervals(self) -> list[TimedInterval]:
        """Return the intervals since the last call, and forget them."""
        taken, self.intervals = self.intervals, []
        return taken


class _PhaseInterval(NamedTuple):
    phase: Phase
    begin: Any
    end: Any
    host_intervals: list[tuple[Timer, TimedInterval]]


class MemoryProbe(Protocol):
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
        self.memory_probe: MemoryProbe | None = None
        self.peak_memory: dict[str, float] = {}  # peak MiB by phase since the last `take_memory`
        self.seconds: Counter[str] = Counter(dict.fromkeys(PHASES, 0.0))
        self._pending: list[_PhaseInterval] = []

    @contextmanager
    def measure(self, phase: Phase, host_timers: Sequence[HostTimer] = ()) -> Iterator[None]:
        """Attribute the time within the context to `phase`, or to the phases of the intervals of `host_timers`.

        The elapsed time is divided in proportion to the intervals. Their sum would exceed it where threads or streams
        work on several hosts at the same time.
        """
        for host_timer in host_timers:
            host_timer.take_intervals()  # drops intervals from before this context
        if self.memory_probe is not None:
            self.memory_probe.begin()
        begin = self.timer.mark()
        yield
        if self.memory_probe is not None and (peak := self.memory_probe.end()) is not None:
            self.peak_memory[phase] = max(peak, self.peak_memory.get(phase, 0.0))
        host_intervals = [(host_timer.timer, lap) for host_timer in host_timers for lap in host_timer.take_intervals()]
        self._pending.append(_PhaseInterval(phase, begin, self.timer.mark(), host_intervals))
        self.collect()

    def collect(self) -> None:
        """Sum the measurements that are complete, without waiting: unfinished GPU work is left for the next call."""
        pending, self._pending = self._pending, []
        for interval in pending:
            if self.timer.has_passed(interval.end):
                self._attribute(interval)
            else:
                self._pending.append(interval)

    def _attribute(self, interval: _PhaseInterval) -> None:
        seconds = self.timer.seconds(interval.begin, interval.end)
        seconds_by_phase: Counter[str] = Counter()
        for timer, host_interval in interval.host_intervals:
            spent = timer.seconds(host_interval.begin, host_interval.end)
            seconds_by_phase.update({phase: share * spent for phase, share in host_interval.shares.items()})
        total = seconds_by_phase.total()
        fractions = (
            {phase: part / total for phase, part in seconds_by_phase.items()} if total > 0.0 else {interval.phase: 1.0}
        )
        self.seconds.update({phase: part * seconds for phase, part in fractions.items()})

    def take_seconds(self) -> dict[str, float]:
        """Return seconds per phase since the last call; on CUDA, of the work that the GPU has finished."""
        self.collect()
        taken: dict[str, float] = {**self.seconds}
        self.seconds = Counter[str](dict.fromkeys(PHASES, 0.0))
        return taken

    def take_memory(self) -> dict[str, float]:
        """Return the peak memory in MiB since the last call, for each phase that has run."""
        taken, self.peak_memory = self.peak_memory, {}
        return taken
