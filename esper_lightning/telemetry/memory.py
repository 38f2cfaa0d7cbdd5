"""How much memory this process holds."""

import os
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


def memory_share(device: torch.device) -> dict[str, float]:
    """The most memory that was in use so far, as a share of the device's; nothing where that is not known."""
    if device.type == "cuda":
        share = torch.cuda.max_memory_allocated(device) / torch.cuda.get_device_properties(device).total_memory
        return {"share": share}
    now = resident()
    return {} if now is None else {"share": now * 2**20 / (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))}
