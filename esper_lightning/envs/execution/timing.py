"""Where a tick's time goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Phase = Literal["train", "validate", "policy", "update", "bookkeeping"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class PhaseClock:
    """Adds up seconds per phase, by the processor's clock (on CUDA: of the calls, not of the kernels)."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken
