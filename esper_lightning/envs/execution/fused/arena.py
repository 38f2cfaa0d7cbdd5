"""Flat storage: the weights of N hosts and all their seeds in one tensor, so that one kernel updates all of them.

A *stacked module* computes all hosts, or all seeds of one kind in one slot; its *owners* are these hosts or seeds.
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
    """A module of stacked layers, and the paths of these layers in a single host or seed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.layers = stacked_layers(module)

    def find(self, owner: nn.Module) -> list[nn.Module]:
        """Return the layers of one host or seed, in the order of `layers`."""
        return [attrgetter(path)(owner) if path else owner for path in self.layers]

    def release(self) -> None:
        """Drop all weights and running statistics."""
        for layer in self.layers.values():
            layer.release()


class Staffed(NamedTuple):
    """A stacked module with its owners in the coming epoch."""

    program: Program
    owners: Sequence[Sequence[nn.Module]]  # [owners][layers]

    def parameters(self) -> list[tuple[nn.Parameter, ...]]:  # [tensor][owner]
        """Return the owners' parameters in the order of `FlatParameters`."""
        return [
            tuple(getattr(single, name) for single in singles)
            for layer, singles in self._by_layer()
            for name in layer.parameter_names
        ]

    def gather_buffers(self) -> None:
        """Copy the owners' running statistics into the stacked layers."""
        for layer, singles in self._by_layer():
            for name in layer.buffer_names:
                layer.register_buffer(name, torch.stack([getattr(single, name) for single in singles]))

    @torch.no_grad()
    def scatter_buffers(self) -> None:
        """Copy running statistics back from the stacked layers to the owners."""
        for layer, singles in self._by_layer():
            for name in layer.buffer_names:
                for single, value in zip(singles, getattr(layer, name).unbind(), strict=True):
                    getattr(single, name).copy_(value)

    def _by_layer(self) -> Iterator[tuple[Stacked, tuple[nn.Module, ...]]]:
        return zip(self.program.layers.values(), zip(*self.owners, strict=True), strict=True)


class Arena:
    """Weights and gradients of all hosts and seeds, flat: by stacked module, then by tensor, then by owner.

    Args:
        assignments: The stacked host with its owners first, then the stacked seeds.

    Attributes:
        values: All weights, [numbers].
        grads: Gradients of all weights, [numbers]; exists only after `bind` with `requires_grad`.
    """

    @torch.no_grad()
    def __init__(self, staff: Sequence[Staffed]) -> None:
        self.staff = staff
        # [stacked module][tensor][owner]
        parameters = [staffed.parameters() for staffed in staff]
        self.shapes = [[(len(same), *same[0].shape) for same in tensors] for tensors in parameters]
        self.parameters = [p for tensors in parameters for same in tensors for p in same]
        self.sizes = [p.numel() for p in self.parameters]
        firsts = accumulate((len(owners) for _, owners in staff), initial=0)
        # Index of each parameter's optimizer group: all hosts first, then all seeds.
        self.groups = [
            first + i for first, tensors in zip(firsts, parameters, strict=False) for same in tensors
            for i in range(len(same))
        ]  # fmt: skip
        self.values = self.gather(self.parameters)

    @staticmethod
    def gather(tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate one tensor per parameter, given in the order of `parameters`, to [numbers]."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def scatter(self, numbers: Tensor, targets: Sequence[Tensor]) -> None:
        """Copy flat numbers into one tensor per parameter: the inverse of `gather`."""
        parts = chain.from_iterable(tensor.unbind() for tensor in chain.from_iterable(self.views(numbers)))
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    def views(self, numbers: Tensor) -> list[list[Tensor]]:  # [stacked module][tensor] [owners, …]
        """Return views of flat numbers, one for each tensor of each stacked module."""
        flat = iter(numbers.split([math.prod(shape) for shapes in self.shapes for shape in shapes]))
        return [[next(flat).view(shape) for shape in shapes] for shapes in self.shapes]

    def give(self, learn: bool) -> None:
        """Bind weights and running statistics to the stacked layers.

        Args:
            requires_grad: Allocate `grads`, into which the backward pass accumulates.
        """
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
        """Write weights and running statistics back to hosts and seeds."""
        self.scatter(self.values, self.parameters)
        for staffed in self.staff:
            staffed.scatter_buffers()
