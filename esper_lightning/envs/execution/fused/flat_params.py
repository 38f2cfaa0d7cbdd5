"""Flat storage: the weights of N hosts and all their seeds in one tensor, so that one kernel updates all of them.

A *stacked module* computes all hosts, or all seeds of one kind in one slot; its *owners* are these hosts or seeds.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_lightning.envs.device_transfer import copy_parts
from esper_lightning.envs.execution.fused.layers import StackedLayer, find_stacked_layers

ALIGNMENT_BYTES = {"cpu": 1, "cuda": 256}
"""Alignment of stacked tensors in flat storage, by type of device.

Tensor cores need 16 bytes, and cuDNN makes a new plan for every alignment that it meets; 256 is that of torch's own
allocations. On the CPU kernels do not ask for any."""


class StackedModule:
    """A module of stacked layers, and the paths of these layers in a single host or seed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.layers = find_stacked_layers(module)

    def layers_of(self, owner: nn.Module) -> list[nn.Module]:
        """Return the layers of one host or seed, in the order of `layers`."""
        return [attrgetter(path)(owner) if path else owner for path in self.layers]

    def release(self) -> None:
        """Drop all weights and running statistics."""
        for layer in self.layers.values():
            layer.release()


class Assignment(NamedTuple):
    """A stacked module with its owners in the coming epoch."""

    stacked_module: StackedModule
    owners: Sequence[Sequence[nn.Module]]  # [owners][layers]

    def parameters(self) -> list[tuple[nn.Parameter, ...]]:  # [tensor][owner]
        """Return the owners' parameters in the order of `FlatParameters`."""
        return [
            tuple(getattr(owner_layer, name) for owner_layer in owner_layers)
            for layer, owner_layers in self._by_layer()
            for name in layer.parameter_names
        ]

    def gather_buffers(self) -> None:
        """Copy the owners' running statistics into the stacked layers."""
        for layer, owner_layers in self._by_layer():
            for name in layer.buffer_names:
                layer.register_buffer(name, torch.stack([getattr(owner_layer, name) for owner_layer in owner_layers]))

    @torch.no_grad()
    def scatter_buffers(self) -> None:
        """Copy running statistics back from the stacked layers to the owners."""
        for layer, owner_layers in self._by_layer():
            for name in layer.buffer_names:
                targets = [getattr(owner_layer, name) for owner_layer in owner_layers]
                copy_parts(getattr(layer, name).flatten(), targets)

    def _by_layer(self) -> Iterator[tuple[StackedLayer, tuple[nn.Module, ...]]]:
        return zip(self.stacked_module.layers.values(), zip(*self.owners, strict=True), strict=True)


class FlatParameters:
    """Weights and gradients of all hosts and seeds, flat: by stacked module, then by tensor, then by owner.

    Args:
        assignments: The stacked host with its owners first, then the stacked seeds.

    Attributes:
        values: All weights, [numbers], with padding that aligns stacked tensors on a GPU.
        grads: Gradients of all weights, [numbers]; exists only after `bind` with `requires_grad`.
    """

    @torch.no_grad()
    def __init__(self, assignments: Sequence[Assignment]) -> None:
        self.assignments = assignments
        # [stacked module][tensor][owner]
        parameters = [staffed.parameters() for staffed in assignments]
        self.shapes = [[(len(same), *same[0].shape) for same in tensors] for tensors in parameters]
        self.parameters = [p for tensors in parameters for same in tensors for p in same]
        first = self.parameters[0]
        unit = max(1, ALIGNMENT_BYTES[first.device.type] // first.element_size())
        self.lengths = [math.prod(shape) for shapes in self.shapes for shape in shapes]  # of each stacked tensor
        self.padding = [-length % unit for length in self.lengths]  # numbers behind each, which are always 0
        first_groups = accumulate((len(owners) for _, owners in assignments), initial=0)
        # Index of each parameter's optimizer group: all hosts first, then all seeds.
        self.groups = [
            first + i for first, tensors in zip(first_groups, parameters, strict=False) for same in tensors
            for i in range(len(same))
        ]  # fmt: skip
        self.values = self.gather(self.parameters)
        # Optimizer group of each number, [numbers] int32; padding belongs to that of the weight before it.
        sizes, owners = [p.numel() for p in self.parameters], [shape[0] for shapes in self.shapes for shape in shapes]
        for last, padding in zip(accumulate(owners), self.padding, strict=True):
            sizes[last - 1] += padding
        self.group_of_number = np.repeat(np.asarray(self.groups, np.int32), sizes)

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate one tensor per parameter, given in the order of `parameters`, to [numbers]."""
        if not any(self.padding):
            return torch.cat([tensor.reshape(-1) for tensor in tensors])
        zeros = tensors[0].new_zeros(max(self.padding))
        parts, given = [], iter(tensors)
        for shape, padding in zip(chain.from_iterable(self.shapes), self.padding, strict=True):
            parts += [tensor.reshape(-1) for tensor in islice(given, shape[0])] + [zeros[:padding]]
        return torch.cat(parts)

    def scatter(self, numbers: Tensor, targets: Sequence[Tensor]) -> None:
        """Copy flat numbers into one tensor per parameter: the inverse of `gather`."""
        given, padded = iter(targets), []
        for shape, padding in zip(chain.from_iterable(self.shapes), self.padding, strict=True):
            padded += [*islice(given, shape[0]), *([numbers.new_empty(padding)] if padding else [])]
        copy_parts(numbers, padded)

    def views(self, numbers: Tensor) -> list[list[Tensor]]:  # [stacked module][tensor] [owners, …]
        """Return views of flat numbers, one for each tensor of each stacked module."""
        sizes = chain.from_iterable(zip(self.lengths, self.padding, strict=True))
        flat = islice(numbers.split(list(sizes)), 0, None, 2)
        return [[next(flat).view(shape) for shape in shapes] for shapes in self.shapes]

    def bind(self, requires_grad: bool) -> None:
        """Bind weights and running statistics to the stacked layers.

        Args:
            requires_grad: Allocate `grads`, into which the backward pass accumulates.
        """
        leaves = []
        for assignment, values in zip(self.assignments, self.views(self.values), strict=True):
            assignment.gather_buffers()
            targets = [
                (layer, name) for layer in assignment.stacked_module.layers.values() for name in layer.parameter_names
            ]
            for (layer, name), value in zip(targets, values, strict=True):
                layer.bound[name] = leaf = value.detach().requires_grad_(requires_grad)
                leaves.append(leaf)
        if requires_grad:
            self.grads = torch.zeros_like(self.values)
            for leaf, grad in zip(leaves, chain.from_iterable(self.views(self.grads)), strict=True):
                leaf.grad = grad

    @torch.no_grad()
    def write_back(self) -> None:
        """Write weights and running statistics back to hosts and seeds."""
        self.scatter(self.values, self.parameters)
        for assignment in self.assignments:
            assignment.scatter_buffers()
