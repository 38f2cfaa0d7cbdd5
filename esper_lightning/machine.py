"""Memory of the machine and of this process."""

import os
from pathlib import Path

import torch

CPU = torch.device("cpu")

PROC_STATUS = Path("/proc/self/status")
"""Linux's status of this process. `ru_maxrss` is no substitute: in a new process it starts at its parent's value."""


def total_memory(device: torch.device = CPU) -> int:
    """Return the memory of a device in bytes; for the CPU that of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_memory(peak: bool = False) -> float | None:
    """Return the resident memory of this process in MiB, or its peak so far. None where there is no /proc."""
    if not PROC_STATUS.exists():
        return None
    name = "VmHWM:" if peak else "VmRSS:"
    (line,) = (line for line in PROC_STATUS.read_text().splitlines() if line.startswith(name))
    return float(line.split()[1]) / 1024
