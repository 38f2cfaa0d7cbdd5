"""How much memory this process holds."""

from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
"""Linux's own books: `ru_maxrss` of a new process begins with what its parent had."""


def resident(peak: bool = False) -> float | None:
    """MiB of this process's memory: now, or the most so far. None where the system has no such books."""
    if not STATUS.exists():
        return None
    name = "VmHWM:" if peak else "VmRSS:"
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return float(line.split()[1]) / 1024


def memory_metrics(device: torch.device) -> dict[str, float]:
    """MiB by whose they are, for plots."""
    metrics = {} if (now := resident()) is None else {"memory/process": now}
    if device.type == "cuda":
        metrics["memory/cuda"] = torch.cuda.memory_allocated(device) / 2**20
    return metrics
