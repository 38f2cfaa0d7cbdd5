"""Gradient statistics of a host and its seeds, on the device until somebody asks."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

VANISHED = 1e-7
"""A tensor whose gradient norm is below this learns nothing: it is at float32's noise for weights near 1."""

EXPLODED = 5.0
"""A tensor whose gradient norm is above this dominates every update."""


VANISHED_COST, EXPLODED_COST = 0.5, 0.8
"""Health lost when every tensor has vanished or exploded: the second also spoils what the others learn."""


class GradientStats(NamedTuple):
    """Of one group of parameters."""

    norm: float
    """Euclidean norm over all numbers."""
    rms: float
    """Root of the mean square of a number: comparable between groups of different size."""
    vanished: float
    """Share of the tensors with a norm below VANISHED, or with no gradient."""
    exploded: float
    """Share of the tensors with a norm above EXPLODED, or not a number."""

    @property
    def health(self) -> float:
        """1: every tensor learns; 1 - 0.5·vanished - 0.8·exploded, not below 0."""
        return max(0.0, 1.0 - VANISHED_COST * self.vanished - EXPLODED_COST * self.exploded)

    def ratio(self, host: "GradientStats") -> float | None:
        """This norm over that of `host`; None where either is zero or not finite: then it says nothing."""
        known = 0.0 < self.norm < math.inf and 0.0 < host.norm < math.inf
        return self.norm / host.norm if known else None


NO_GRADIENT = GradientStats(norm=0.0, rms=0.0, vanished=0.0, exploded=0.0)
"""Of no tensors at all."""


def gradient_stats(
    parameters: Iterable[nn.Parameter], device: torch.device | None = None
) -> Tensor:  # [4] = GradientStats, on the parameters' device, or on `device` if there are none
    """Statistics of the gradients at hand. Nothing to train: NO_GRADIENT; tensors without a gradient: all vanished."""
    tensors = [parameter for parameter in parameters if parameter.requires_grad]
    norms = [torch.linalg.vector_norm(p.grad) for p in tensors if p.grad is not None]
    if not norms:
        # Filled on the device: a copy of numbers to it would wait for all that is queued there.
        stats = torch.zeros(len(NO_GRADIENT), device=tensors[0].device if tensors else device)
        stats[NO_GRADIENT._fields.index("vanished")].fill_(float(bool(tensors)))
        return stats
    return stats_of_norms(torch.stack(norms), sum(p.numel() for p in tensors), len(tensors) - len(norms))


def stats_of_norms(norms: Tensor, numbers: int, missing: int = 0) -> Tensor:  # [..., tensors] -> [..., 4]
    """GradientStats from the norm of each tensor; `numbers` in all, `missing` tensors beside these without gradient."""
    tensors = norms.shape[-1] + missing
    norm = torch.linalg.vector_norm(norms, dim=-1)
    vanished = ((norms < VANISHED).sum(-1) + missing) / tensors
    exploded = (~(norms <= EXPLODED)).sum(-1) / tensors
    return torch.stack([norm, norm / math.sqrt(numbers), vanished, exploded], -1)
