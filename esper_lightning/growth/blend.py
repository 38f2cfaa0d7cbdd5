"""How a seed's output meets the host's feature: h = host feature, s = seed output, both of one shape, alpha 0 … 1.

Each style is exactly h at alpha 0, for finite s. Pure tensor functions, and the small gate that one of them learns.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

Style = Literal["add", "multiply", "gate"]

MIN_GATE_WIDTH = 8
"""Least hidden features of the gate: it sees only C means."""


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, h: Tensor, s: Tensor) -> Tensor:
        ctx.dtype = s.dtype
        return h.clone()  # not a view: the host may go on in place

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.to(ctx.dtype)


def straight_through(h: Tensor, s: Tensor) -> Tensor:
    """Returns `h`, bit for bit; backward gives the gradient to `h` and to `s` alike (https://arxiv.org/abs/1308.3432).

    The usual `h + (s - s.detach())` is not `h` bit for bit, and an infinite `s` would make it NaN.
    """
    return _StraightThrough.apply(h, s)


def add(h: Tensor, s: Tensor, alpha: Tensor) -> Tensor:
    """(1 - alpha)·h + alpha·s, and exactly `s` at alpha 1; `alpha` broadcasts against `h`."""
    # Under autocast a seed's layers may give another precision than the host's.
    return torch.lerp(h, s.to(h.dtype), alpha.to(h.dtype))


def multiply(h: Tensor, s: Tensor, seen: Tensor, alpha: Tensor) -> Tensor:
    """h·(1 + alpha·tanh(s - seen)): the seed scales each number of the feature, by at most 2.

    `seen` is the feature as the seed saw it: `h`, or `h` detached so that it gets no gradient through the seed.
    """
    return h * (1.0 + alpha.to(h.dtype) * torch.tanh(s.to(h.dtype) - seen))


def mix(style: Style, x: Tensor, seed: nn.Module, seen: Tensor, alpha: Tensor) -> Tensor:
    """Blends the answer of `seed` to `seen` into `x`; under style "gate" it is a GatedSeed."""
    grown = seed(seen)
    if style == "add":
        return add(x, grown, alpha)
    if style == "gate":
        return add(x, grown, alpha * seed.gate(seen))
    return multiply(x, grown, seen, alpha)


class SampleGate(nn.Module):
    """How much of the seed a sample wants, 0 … 1: mean over positions, two linear layers, sigmoid.

    Args:
        width: Channels C of the feature.
        channels: The axis of the feature that holds them: 1 for images and vectors, -1 for sequences.
    """

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.channels = channels
        inner = max(MIN_GATE_WIDTH, width // 4)
        self.layers = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, 1), nn.Sigmoid())

    def forward(self, h: Tensor) -> Tensor:  # [B, …] -> [B, 1, …], to broadcast against the feature
        means = h.movedim(self.channels, 1).flatten(2).mean(2) if h.ndim > 2 else h  # [B, C]
        gates = self.layers(means)
        return gates.view(*gates.shape, *[1] * (h.ndim - 2))


class GatedSeed(nn.Module):
    """A seed and its gate: one module, so that they are trained, counted, kept and removed together."""

    def __init__(self, seed: nn.Module, gate: SampleGate) -> None:
        super().__init__()
        self.seed = seed
        self.gate = gate

    def forward(self, h: Tensor) -> Tensor:
        return self.seed(h)
