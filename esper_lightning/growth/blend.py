"""How a seed's output meets the host's feature. Pure tensor functions; h = host feature, s = seed output."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, h: Tensor, s: Tensor) -> Tensor:
        return h.clone()  # not a view: the host may go on in place

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def straight_through(h: Tensor, s: Tensor) -> Tensor:
    """Returns `h`, bit for bit; backward gives the gradient to `h` and to `s` alike (https://arxiv.org/abs/1308.3432).

    The usual `h + (s - s.detach())` is not `h` bit for bit, and an infinite `s` would make it NaN.
    """
    return _StraightThrough.apply(h, s)


def add(h: Tensor, s: Tensor, alpha: Tensor) -> Tensor:
    """Linear blend (1 - alpha)·h + alpha·s; exactly `h` at alpha 0 and exactly `s` at alpha 1 for finite inputs."""
    return torch.lerp(h, s, alpha)
