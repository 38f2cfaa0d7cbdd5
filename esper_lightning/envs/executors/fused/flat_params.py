"""Flat storage: the weights of N hosts and all their seeds in one tensor, so that one kernel updates all of them.

A *stacked module* computes all hosts, or all seeds of one kind in one slot; its *owners* are these hosts or seeds.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_lightning.envs.executors.fused.layers import StackedLayer, find_stacked_layers

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
    owners: Sequence[nn.Module]
    hosts: Sequence[int]  # index of the host that each owner is, or grows in

    def is_same(self, other: "Assignment") -> bool:
        """Return whether another assignment has the same owners in the same order, compared by identity."""
        return (
            self.stacked_module is other.stacked_module
            and len(self.owners) == len(other.owners)
            and all(a is b for a, b in zip(self.owners, other.owners, strict=True))
        )

    def parameters(self) -> list[nn.Parameter]:
        """Return the owners' parameters, by tensor, then by owner."""
        return [
            getattr(owner_layer, name)
            for layer, owner_layers in self._by_layer()
            for name in layer.parameter_names
            for owner_layer in owner_layers
        ]

    def buffers(self) -> list["StackedBuffer"]:
        """Return the running statistics of all owners."""
        return [
            StackedBuffer(layer, name, owner_layers)
            for layer, owner_layers in self._by_layer()
            for name in layer.buffer_names
        ]

    def _by_layer(self) -> Iterator[tuple[StackedLayer, tuple[nn.Module, ...]]]:
        owner_layers = [self.stacked_module.layers_of(owner) for owner in self.owners]
        return zip(self.stacked_module.layers.values(), zip(*owner_layers, strict=True), strict=True)


class StackedBuffer(NamedTuple):
    """A running statistic of a stacked layer, and the layers of its owners."""

    layer: StackedLayer
    name: str
    owner_layers: Sequence[nn.Module]

    def gather(self) -> Tensor:  # [owners, …]
        """Return a stacked copy of the owners' statistics."""
        return torch.stack([getattr(owner_layer, self.name) for owner_layer in self.owner_layers])

    def bind(self, value: Tensor) -> None:
        """Let the stacked layer compute with these statistics, and update them in place in training."""
        self.layer.register_buffer(self.name, value)


class Section:
    """Place of one stacked module's parameters in flat storage: by tensor, then by owner.

    Attributes:
        parameters: The owners' parameters in this order.
        shapes: Shape of each stacked tensor, [owners, …].
        padding: Numbers behind each stacked tensor that align the next one on a GPU; they are always 0.
        size: Length of the section in numbers, with padding.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.parameters = assignment.parameters()
        self.owners = len(assignment.owners)
        self.shapes = [(self.owners, *p.shape) for p in self.parameters[:: self.owners]]
        self.lengths = [math.prod(shape) for shape in self.shapes]
        unit = 1
        if self.parameters:
            first = self.parameters[0]
            unit = max(1, ALIGNMENT_BYTES[first.device.type] // first.element_size())
        self.padding = [-length % unit for length in self.lengths]
        self.size = sum(self.lengths) + sum(self.padding)

    def owner_of_number(self) -> np.ndarray:  # [size] int32
        """Return the owner of each number; padding belongs to that of the weight before it."""
        sizes = [
            length // self.owners + (padding if i == self.owners - 1 else 0)
            for length, padding in zip(self.lengths, self.padding, strict=True)
            for i in range(self.owners)
        ]
        return np.repeat(np.tile(np.arange(self.owners, dtype=np.int32), len(self.shapes)), sizes)

    def padded(self, tensors: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield one flat tensor per parameter, and zeros for padding."""
        for padding in self.padding:
            stacked = list(islice(tensors, self.owners))
            yield from (tensor.reshape(-1) for tensor in stacked)
            if padding:
                yield stacked[0].new_zeros(padding)

    def views(self, numbers: Tensor) -> list[Tensor]:  # [size] -> [tensor] [owners, …]
        """Return views of the section's numbers, one for each stacked tensor."""
        sizes = chain.from_iterable(zip(self.lengths, self.padding, strict=True))
        flat = islice(numbers.split(list(sizes)), 0, None, 2)
        return [part.view(shape) for part, shape in zip(flat, self.shapes, strict=True)]

    def rows(self, numbers: Tensor) -> list[Tensor]:  # [size] -> one per parameter
        """Return views of the section's numbers, one for each parameter."""
        return [row for view in self.views(numbers) for row in view.unbind()]


class FlatParameters:
    """Copies of the weights of all hosts and seeds, flat: by stacked module, then by tensor, then by owner.

    Args:
        assignments: The stacked host with its owners first, then the stacked seeds.

    Attributes:
        values: All weights, [numbers], with padding that aligns stacked tensors on a GPU.
        grads: Gradients of all weights, [numbers]; exists only after `bind` with `requires_grad`.
    """

    values: Tensor
    grads: Tensor

    @torch.no_grad()
    def __init__(self, assignments: Sequence[Assignment]) -> None:
        self.sections: Sequence[Section] = [Section(assignment) for assignment in assignments]
        self.values = self.gather(self.parameters)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of all owners, by stacked module, then by tensor, then by owner."""
        return [p for section in self.sections for p in section.parameters]

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate one tensor per parameter, given in the order of `parameters`, to [numbers]."""
        given = iter(tensors)
        return torch.cat([part for section in self.sections for part in section.padded(given)])

    def split(self, numbers: Tensor) -> Sequence[Tensor]:
        """Return the part of each section, given all numbers."""
        return numbers.split([section.size for section in self.sections])

    def views(self, numbers: Tensor) -> list[list[Tensor]]:  # [stacked module][tensor] [owners, …]
        """Return views of flat numbers, one for each tensor of each stacked module."""
        return [section.views(part) for section, part in zip(self.sections, self.split(numbers), strict=True)]

    def bind(self, requires_grad: bool) -> None:
        """Bind weights and running statistics to the stacked layers.

        Args:
            requires_grad: Let the backward pass accumulate into `grads`.
        """
        leaves = []
        for section, values in zip(self.sections, self.views(self.values), strict=True):
            layers = section.assignment.stacked_module.layers.values()
            targets = [(layer, name) for layer in layers for name in layer.parameter_names]
            for (layer, name), value in zip(targets, values, strict=True):
                layer.bound[name] = leaf = value.detach().requires_grad_(requires_grad)
                leaves.append(leaf)
        self.bind_buffers()
        if requires_grad:
            self.grads = self.new_grads()
            for leaf, grad in zip(leaves, chain.from_iterable(self.views(self.grads)), strict=True):
                leaf.grad = grad

    def bind_buffers(self) -> None:
        """Bind running statistics to the stacked layers."""
        for section in self.sections:
            for buffer in section.assignment.buffers():
                buffer.bind(buffer.gather())

    def new_grads(self) -> Tensor:  # [numbers]
        """Return memory for gradients."""
        return torch.zeros_like(self.values)
