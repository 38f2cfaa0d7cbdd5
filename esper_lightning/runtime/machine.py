"""This process and its machine: memory, time by phase, and the record of a run: command, devices and versions."""

import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from esper_lightning import __version__

CPU = torch.device("cpu")

CUDNN: Any = torch.backends.cudnn  # torch declares no `conv` and `rnn`
FLOAT32_PARTS: tuple[Any, ...] = (torch.backends.cuda.matmul, CUDNN.conv, CUDNN.rnn)
"""Parts of torch that may round float32 to TF32 on a GPU, by their `fp32_precision`."""

Phase = Literal["train", "validate", "policy", "update", "governor", "bookkeeping", "telemetry"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Names of all phases. With executor streams `train` includes the validation, which overlaps it."""

PROC_STATUS = Path("/proc/self/status")
"""Linux's status of this process. `ru_maxrss` is no substitute: in a new process it starts at its parent's value."""

OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "Storage size calculation overflowed",
    "numel: integer multiplication overflow",
    "Overflow when unpacking long",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "nable to find an engine to execute this computation",
)
"""Texts in the RuntimeErrors that torch raises if memory is short: of the CPU, of CUDA and its libraries, or any."""


def total_memory(device: torch.device = CPU) -> int:
    """Return the memory of a device in bytes; for the CPU that of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_memory() -> float | None:
    """Return the resident memory of this process in MiB, None where there is no /proc."""
    if not PROC_STATUS.exists():
        return None
    (line,) = (line for line in PROC_STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
    return float(line.split()[1]) / 1024


def is_out_of_memory(error: Exception) -> bool:
    """Return True if a GPU, torch on the CPU or Python itself ran out of memory."""
    has_text = any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or has_text


def first_line(error: Exception) -> str:
    """Return the first line of the message of an out-of-memory error, as `out of memory: …`."""
    message = str(error).strip() or "Python has no more"  # a MemoryError of Python has no message
    return f"out of memory: {message.splitlines()[0]}"


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


def provenance(rng_seed: int | None, device: torch.device, executor: str, *, precision: str) -> dict[str, Any]:
    """Return the command, device, software versions and git revision of this process; no environment variables."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": sys.argv,
        "seed": rng_seed,
        "device": str(device),
        "executor": executor,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "python": sys.version,
        "platform": platform.platform(),
        "processor": ", ".join([platform.processor() or platform.machine(), *gpus]),
        "versions": versions(),
        "git": git_revision(Path(__file__)),
    }


def versions() -> dict[str, str]:
    """Return the versions of this package and of those that its numbers depend on."""
    return {"esper-lightning": __version__} | {name: version(name) for name in ("torch", "lightning", "numpy")}


def git_revision(file: Path) -> dict[str, Any] | None:
    """Return the git commit of `file` and whether tracked files differ from it, or None outside of a repository."""

    def git(*command: str) -> str:
        # A killed `git status` would leave a locked index behind, with which the user cannot commit.
        line = ["git", "--no-optional-locks", *command]
        return subprocess.run(line, cwd=file.parent, capture_output=True, text=True, timeout=10, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", file.name)  # the package may be installed within another repository
        return {"commit": git("rev-parse", "HEAD").strip(), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
