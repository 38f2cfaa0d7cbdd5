"""Gradient statistics of a host and its seeds, on the device until somebody asks."""

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
    """Euclidean norm over all tensors."""
    health: float
    """1: every tensor learns; lower by the shares of vanished and exploded tensors."""


def gradient_stats(parameters: Iterable[nn.Parameter]) -> Tensor:  # [2] = GradientStats, on the parameters' device
    """Norm and health of the gradients at hand; tensors without one count as vanished, no tensors as norm 0, health 1.

    Health is 1 - 0.5·share(norm < 1e-7) - 0.8·share(norm > 5), not below 0.
    """
    tensors = list(parameters)
    norms = [torch.linalg.vector_norm(p.grad) for p in tensors if p.grad is not None]
    if not norms:
        return torch.tensor(
            [0.0, 1.0 - VANISHED_COST if tensors else 1.0], device=tensors[0].device if tensors else None
        )
    stacked = torch.stack(norms)
    without = len(tensors) - len(norms)
    vanished = (stacked < VANISHED).sum() + without
    exploded = (stacked > EXPLODED).sum()
    health = (1.0 - (VANISHED_COST * vanished + EXPLODED_COST * exploded) / len(tensors)).clamp(min=0.0)
    return torch.stack([torch.linalg.vector_norm(stacked), health])
