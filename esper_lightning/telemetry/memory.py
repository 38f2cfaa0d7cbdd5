"""Memory in use by this process and on its GPU."""

import torch

from esper_lightning.machine import resident_memory, total_memory


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the memory of the process and of tensors on the GPU in MiB, by tag."""
    metrics = {} if (now := resident_memory()) is None else {"memory/process": now}
    if device.type == "cuda":
        metrics["memory/cuda"] = torch.cuda.memory_allocated(device) / 2**20
    return metrics


class ProcessMemoryProbe:
    """Measures the resident memory of the process at the end of a phase."""

    def begin(self) -> None:
        """Start a phase; there is nothing to prepare."""

    def end(self) -> float | None:
        """Return the resident memory in MiB; None where it cannot be measured."""
        return resident_memory()


class CudaMemoryProbe:
    """Measures the peak memory of tensors on a GPU within a phase, without synchronising.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """Start a phase: reset the peak."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def end(self) -> float | None:
        """Return the peak of the phase in MiB."""
        return torch.cuda.max_memory_allocated(self.device) / 2**20


def make_memory_probe(device: torch.device) -> ProcessMemoryProbe | CudaMemoryProbe:
    """Return the memory probe for work on `device`."""
    return CudaMemoryProbe(device) if device.type == "cuda" else ProcessMemoryProbe()


def memory_share(device: torch.device, peak: float) -> dict[str, float]:
    """Return the memory in use as a share of the device's memory; nothing where it cannot be measured.

    On a GPU the memory in use is `peak`: the peak memory of tensors so far, in MiB.
    """
    if device.type == "cuda":
        return {"share": peak * 2**20 / total_memory(device)}
    now = resident_memory()
    return {} if now is None else {"share": now * 2**20 / total_memory(device)}
