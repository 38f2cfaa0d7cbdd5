"""Time by phase of an environment step: by the processor's clock, or by events in the stream of a GPU."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch

Phase = Literal["train", "validate", "policy", "update", "governor", "bookkeeping", "telemetry"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Names of all phases. With executor streams `train` includes the validation, which overlaps it."""


class PhaseClock:
    """Sums the seconds of each phase, by the clock called `name`.

    On CUDA a phase lasts between two events in the current stream, since calls return before their kernels run.
    Elsewhere the processor's time counts; on Apple's `mps` a phase then takes the time in which its work is queued.
    `profile` is a context of each phase beside the clock's own, such as that of Lightning's profiler.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = "cuda_events" if device.type == "cuda" else "perf_counter"
        self.profile: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self._seconds: Counter[str] = Counter()
        self._pending: list[tuple[str, Any, Any]] = []  # phase, marks of its begin and end

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Attribute the time within the context to `phase`."""
        begin = self._mark()
        with self.profile(phase):
            yield
        self._pending.append((phase, begin, self._mark()))
        self._collect()

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _collect(self) -> None:
        """Sum the measurements that are complete, without waiting: unfinished GPU work is left for the next call."""
        pending, self._pending = self._pending, []
        for phase, begin, end in pending:
            if self.device.type != "cuda":
                self._seconds[phase] += end - begin
            elif end.query():
                self._seconds[phase] += begin.elapsed_time(end) / 1000.0
            else:
                self._pending.append((phase, begin, end))

    def take_seconds(self) -> dict[str, float]:
        """Return seconds per phase since the last call; on CUDA, of the work that the GPU has finished."""
        self._collect()
        taken, self._seconds = {phase: float(self._seconds[phase]) for phase in PHASES}, Counter()
        return taken
