"""Memory of the machine, and refusals of what is larger before any of it is taken."""

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


def check_memory(needed: int, what: str, advice: str, device: torch.device = CPU) -> None:
    """Raise ValueError if something needs more than the device's memory.

    Args:
        needed: Least number of bytes that it needs.
        what: Beginning of the error message, with the verb, as in "12 hosts need".
        advice: End of the error message.
        device: Device whose memory is taken.
    """
    memory = total_memory(device)
    if needed > memory:
        gibibytes = min(needed, 2**100) / 2**30  # a float holds no number of 400 digits
        raise ValueError(f"{what} at least {gibibytes:.1f} GiB, and {device} has {memory / 2**30:.1f} GiB; {advice}")
