"""The weights of N hosts and all their seeds in one piece of memory, so that one kernel serves all of them.

A *program* is a host or a bank of seeds; its *owners* are the hosts or seeds that it computes. P numbers of one owner.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.envs.execution.fused.layers import Stacked, stacked_layers


class Program:
    """Stacked layers, and how to find the same layers in a single host or seed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.layers = stacked_layers(module)

    def find(self, owner: nn.Module) -> list[nn.Module]:
        """The layers of one host or seed, in the order of `layers`."""
        return [attrgetter(path)(owner) if path else owner for path in self.layers]

    def release(self) -> None:
        """Lets go of all weights and running statistics."""
        for layer in self.layers.values():
            layer.release()


class Staffed(NamedTuple):
    """A program and, for each of its owners in the coming epoch, the owner's layers."""

    program: Program
    owners: Sequence[Sequence[nn.Module]]

    def parameters(self) -> list[tuple[nn.Parameter, ...]]:  # [tensor][owner]
        """In the order in which an arena holds them."""
        return [
            tuple(getattr(single, name) for single in singles)
            for layer, singles in self._by_layer()
            for name in layer.parameter_names
        ]

    def gather_buffers(self) -> None:
        """Takes the owners' running statistics in."""
        for layer, singles in self._by_layer():
            for name in layer.buffer_names:
                layer.register_buffer(name, torch.stack([getattr(single, name) for single in singles]))

    @torch.no_grad()
    def scatter_buffers(self) -> None:
        """Gives them back."""
        for layer, singles in self._by_layer():
            for name in layer.buffer_names:
                for single, value in zip(singles, getattr(layer, name).unbind(), strict=True):
                    getattr(single, name).copy_(value)

    def _by_layer(self) -> Iterator[tuple[Stacked, tuple[nn.Module, ...]]]:
        return zip(self.program.layers.values(), zip(*self.owners, strict=True), strict=True)


class Arena:
    """Weights and gradients of everything that trains: tensor by tensor of each program, owner by owner of each tensor.

    Args:
        staff: The hosts' program first, then the banks'.

    Attributes:
        values: All weights, one after the other.
        grads: Their gradients; only where there is something to learn.
    """

    @torch.no_grad()
    def __init__(self, staff: Sequence[Staffed]) -> None:
        self.staff = staff
        # [program][tensor][owner]
        parameters = [staffed.parameters() for staffed in staff]
        self.shapes = [[(len(same), *same[0].shape) for same in tensors] for tensors in parameters]
        self.parameters = [p for tensors in parameters for same in tensors for p in same]
        self.sizes = [p.numel() for p in self.parameters]
        firsts = accumulate((len(owners) for _, owners in staff), initial=0)
        # The optimizer's group of each parameter: hosts first, then seed after seed.
        self.groups = [
            first + i for first, tensors in zip(firsts, parameters, strict=False) for same in tensors
            for i in range(len(same))
        ]  # fmt: skip
        self.values = self.gather(self.parameters)

    @staticmethod
    def gather(tensors: Sequence[Tensor]) -> Tensor:
        """The numbers of a tensor for each parameter, in the arena's order."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def scatter(self, numbers: Tensor, targets: Sequence[Tensor]) -> None:
        """The inverse of `gather`."""
        parts = chain.from_iterable(tensor.unbind() for tensor in chain.from_iterable(self.views(numbers)))
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    def views(self, numbers: Tensor) -> list[list[Tensor]]:  # [program][tensor] [owners, …]
        """By programs and tensors."""
        flat = iter(numbers.split([math.prod(shape) for shapes in self.shapes for shape in shapes]))
        return [[next(flat).view(shape) for shape in shapes] for shapes in self.shapes]

    def give(self, learn: bool) -> None:
        """Hands weights and running statistics to the stacked layers. To learn: what backward finds goes to `grads`."""
        leaves = []
        for staffed, values in zip(self.staff, self.views(self.values), strict=True):
            staffed.gather_buffers()
            places = [(layer, name) for layer in staffed.program.layers.values() for name in layer.parameter_names]
            for (layer, name), value in zip(places, values, strict=True):
                layer.given[name] = leaf = value.detach().requires_grad_(learn)
                leaves.append(leaf)
        if learn:
            self.grads = torch.zeros_like(self.values)
            for leaf, grad in zip(leaves, chain.from_iterable(self.views(self.grads)), strict=True):
                leaf.grad = grad

    @torch.no_grad()
    def take_back(self) -> None:
        """Writes weights and running statistics back to hosts and seeds."""
        self.scatter(self.values, self.parameters)
        for staffed in self.staff:
            staffed.scatter_buffers()
