"""Layers in which rows of a batch see each other in evaluation, or that draw random numbers there."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BatchAttention(nn.Module):
    """Each row attends to all rows of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.softmax(x @ x.T, 1) @ x


class Experts(nn.Module):
    """Two experts, each of which takes as many of the first rows as the capacity allows; others pass by."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 2), nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.router(x).argmax(1), 2)
        taken = (chosen.cumsum(0) * chosen <= 0.6 * len(x)) & chosen.bool()
        return x + sum(taken[:, i, None] * 3.0 * torch.tanh(expert(x)) for i, expert in enumerate(self.experts))


class Always(nn.Module):
    """Dropout that is left on in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, training=True)


MIXING: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm without statistics": lambda: nn.BatchNorm1d(16, track_running_stats=False),
    "batch attention": BatchAttention,
    "experts with a capacity": lambda: Experts(16),
    "softmax over the batch": lambda: nn.Softmax(0),
    "dropout in evaluation": Always,
}
