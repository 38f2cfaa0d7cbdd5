"""Gradient statistics of a host and its seeds, computed without waiting for the device."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

VANISHED_NORM = 1e-7
"""Gradient norm below which a tensor does not learn: float32 rounding noise for weights near 1."""

EXPLODED_NORM = 5.0
"""Gradient norm above which a tensor dominates every update."""


VANISHED_HEALTH_COST, EXPLODED_HEALTH_COST = 0.5, 0.8
"""Health lost when every tensor has vanished or exploded; exploded ones also disturb the training of the others."""


class GradientStats(NamedTuple):
    """Gradient statistics of one group of parameters."""

    norm: float
    """Euclidean norm over all elements."""
    rms: float
    """Root mean square over all elements: comparable between groups of different size."""
    vanished: float
    """Share of the tensors with a norm below `VANISHED_NORM`, or without a gradient."""
    exploded: float
    """Share of the tensors with a norm above `EXPLODED_NORM`, or NaN."""

    @property
    def health(self) -> float:
        """Gradient health 1 - 0.5·vanished - 0.8·exploded, at least 0; 1 means that every tensor learns."""
        return max(0.0, 1.0 - VANISHED_HEALTH_COST * self.vanished - EXPLODED_HEALTH_COST * self.exploded)

    def ratio(self, host: "GradientStats") -> float | None:
        """Return this norm divided by the norm of `host`; None if either is zero or not finite."""
        is_defined = 0.0 < self.norm < math.inf and 0.0 < host.norm < math.inf
        return self.norm / host.norm if is_defined else None


NO_GRADIENT = GradientStats(norm=0.0, rms=0.0, vanished=0.0, exploded=0.0)
"""Statistics of an empty group of parameters."""


def gradient_stats(
    parameters: Iterable[nn.Parameter], device: torch.device | None = None
) -> Tensor:  # [4] = GradientStats, on the parameters' device, or on `device` if there are none
    """Return statistics of the present gradients: NO_GRADIENT if nothing is trainable; no gradient means vanished."""
    tensors = [parameter for parameter in parameters if parameter.requires_grad]
    norms = [torch.linalg.vector_norm(p.grad) for p in tensors if p.grad is not None]
    if not norms:
        # Filled on the device: a copy from the CPU would wait for all queued work.
        stats = torch.zeros(len(NO_GRADIENT), device=tensors[0].device if tensors else device)
        stats[NO_GRADIENT._fields.index("vanished")].fill_(float(bool(tensors)))
        return stats
    return stats_of_norms(torch.stack(norms), sum(p.numel() for p in tensors), len(tensors) - len(norms))


def stats_of_norms(norms: Tensor, num_elements: int, num_missing: int = 0) -> Tensor:  # [..., tensors] -> [..., 4]
    """Return GradientStats from the norms of tensors, `num_elements` in all; `num_missing` more have no gradient."""
    num_tensors = norms.shape[-1] + num_missing
    norm = torch.linalg.vector_norm(norms, dim=-1)
    vanished = ((norms < VANISHED_NORM).sum(-1) + num_missing) / num_tensors
    exploded = (~(norms <= EXPLODED_NORM)).sum(-1) / num_tensors
    return torch.stack([norm, norm / math.sqrt(num_elements), vanished, exploded], -1)
