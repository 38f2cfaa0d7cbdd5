"""Time and memory by phase of an environment step: by the processor's clock, or by events in the streams of a GPU."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch

from esper_lightning.machine import resident_memory

Phase = Literal[
    "data", "train", "validate", "counterfactual", "policy", "update", "governor", "bookkeeping", "telemetry"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Names of all phases.

`data` is drawing, fetching and augmenting minibatches, and is not part of `train`. `counterfactual` is the share of the
validation pass spent on combinations of seeds other than all seeds, and `validate` the rest of the pass."""


class Timer:
    """Takes marks of the present moment, which are read later.

    On CUDA a mark is an event in the current stream, since calls return before their kernels run. Elsewhere it is the
    processor's time; on Apple's `mps` a phase then takes the time in which its work is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = "cuda_events" if device.type == "cuda" else "perf_counter"

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def has_passed(self, mark: Any) -> bool:
        """Return whether the device has reached the mark, without waiting."""
        return mark.query() if self.device.type == "cuda" else True

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks, both of which the device has reached."""
        return begin.elapsed_time(end) / 1000.0 if self.device.type == "cuda" else end - begin


class HostTimer(Timer):
    """Timer of the work on one host, used in the thread or stream that does the work."""

    _begin: Any = None

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.intervals: list[tuple[Any, Any, dict[str, float]]] = []  # begin, end, and shares by phase

    def start(self) -> None:
        """Begin an interval; the time since the last one was not work on this host."""
        self._begin = self.mark()

    def record(self, **shares: float) -> None:
        """End the interval, attribute it to phases in these shares, and begin the next interval."""
        end = self.mark()
        self.intervals.append((self._begin, end, shares))
        self._begin = end

    def take_intervals(self) -> list[tuple[Any, Any, dict[str, float]]]:
        """Return the intervals since the last call, and forget them."""
        taken, self.intervals = self.intervals, []
        return taken


class PhaseClock:
    """Sums the seconds of each phase, and finds its peak memory.

    Args:
        device: Device of the pool's observations.

    Attributes:
        profile: Context of each phase beside the clock's own, such as that of Lightning's profiler.
        measures_memory: True to measure memory, too; on a GPU that resets its peak with each phase.
    """

    def __init__(self, device: torch.device) -> None:
        self.timer = Timer(device)
        self.profile: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.measures_memory = False
        self._peaks: dict[str, float] = {}  # MiB by phase
        self._seconds: Counter[str] = Counter()
        self._pending: list[tuple[str, Any, Any, list[tuple[HostTimer, Any]]]] = []  # phase, begin, end, intervals

    @contextmanager
    def measure(self, phase: Phase, host_timers: Sequence[HostTimer] = ()) -> Iterator[None]:
        """Attribute the time within the context to `phase`, or to the phases of the intervals of `host_timers`.

        The elapsed time is divided in proportion to the intervals. Their sum would exceed it where threads or streams
        work on several hosts at the same time.
        """
        device, on_gpu = self.timer.device, self.timer.device.type == "cuda"
        for host_timer in host_timers:
            host_timer.take_intervals()  # drops intervals from before this context
        if self.measures_memory and on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        begin = self.timer.mark()
        with self.profile(phase):
            yield
        if self.measures_memory:
            held = torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else resident_memory()
            self._peaks |= {} if held is None else {phase: max(held, self._peaks.get(phase, 0.0))}
        intervals = [(host_timer, lap) for host_timer in host_timers for lap in host_timer.take_intervals()]
        self._pending.append((phase, begin, self.timer.mark(), intervals))
        self._collect()

    def _collect(self) -> None:
        """Sum the measurements that are complete, without waiting: unfinished GPU work is left for the next call."""
        pending, self._pending = self._pending, []
        for phase, begin, end, intervals in pending:
            if not self.timer.has_passed(end):
                self._pending.append((phase, begin, end, intervals))
                continue
            of_hosts: Counter[str] = Counter()
            for host_timer, (lap_begin, lap_end, shares) in intervals:
                spent = host_timer.seconds(lap_begin, lap_end)
                of_hosts.update({part: share * spent for part, share in shares.items()})
            elapsed, total = self.timer.seconds(begin, end), of_hosts.total()
            parts = {part: spent / total for part, spent in of_hosts.items()} if total > 0.0 else {phase: 1.0}
            self._seconds.update({part: share * elapsed for part, share in parts.items()})

    def take_seconds(self) -> dict[str, float]:
        """Return seconds per phase since the last call; on CUDA, of the work that the GPU has finished."""
        self._collect()
        taken, self._seconds = {phase: float(self._seconds[phase]) for phase in PHASES}, Counter()
        return taken

    def take_memory(self) -> dict[str, float]:
        """Return the peak memory in MiB since the last call, for each phase that has run."""
        taken, self._peaks = self._peaks, {}
        return taken
