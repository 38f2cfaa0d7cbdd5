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


class ProcessGauge:
    """What the process holds when a phase ends."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def end(self) -> float | None:
        """MiB."""
        return resident()


class CudaGauge:
    """The most that tensors on a GPU held within a phase; nobody waits for it.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """The most so far counts no more."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def end(self) -> float | None:
        """MiB."""
        return torch.cuda.max_memory_allocated(self.device) / 2**20


def make_gauge(device: torch.device) -> ProcessGauge | CudaGauge:
    """For work on `device`."""
    return CudaGauge(device) if device.type == "cuda" else ProcessGauge()


def memory_share(device: torch.device, most: float) -> dict[str, float]:
    """Memory in use, on a GPU the `most` MiB that tensors held so far, as a share of the device's; nothing where that
    is not known."""
    if device.type == "cuda":
        return {"share": most * 2**20 / torch.cuda.get_device_properties(device).total_memory}
    now = resident()
    return {} if now is None else {"share": now * 2**20 / (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))}
