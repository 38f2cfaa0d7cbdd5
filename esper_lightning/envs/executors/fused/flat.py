"""Flat memory of the weights of N hosts and all their seeds, so that one kernel updates all of them.

A *batched module* computes all hosts, or all seeds of one kind in one slot; its *owners* are these hosts or seeds.
Their numbers lie in a *section*: by tensor, then by owner.

Hosts in training live in the `Arena`: their parameters, optimizer state and running statistics are views of its rows,
so that an epoch neither gathers them nor writes them back. Before each epoch the arena looks which of these tensors are
still its rows. What has moved meanwhile is copied back: an optimizer state that was loaded, or a host that was trained
in another arena.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_lightning.envs.executors.fused.layers import BatchedLayer
from esper_lightning.envs.measurements import upload

ALIGNMENT = 32
"""Bytes to which batched tensors are aligned: as many as cuDNN looks at; with others it makes a plan for each."""

STEP = "step"
"""State key of a parameter's step count, which is a single number."""


class BatchedModule:
    """A module of batched layers, and the paths of these layers, which are those in a single host or seed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.layers = {path: layer for path, layer in module.named_modules() if isinstance(layer, BatchedLayer)}

    def release(self) -> None:
        """Drop all weights and running statistics."""
        for layer in self.layers.values():
            layer.release()


class Assignment(NamedTuple):
    """A batched module with its owners in the coming epoch."""

    batched: BatchedModule
    owners: Sequence[nn.Module]
    hosts: Sequence[int]  # index of the host that each owner is, or grows in
    blocks: Sequence[nn.Module] = ()  # parts of the owners that may be replaced: those of lists that grow in depth

    def is_same(self, other: "Assignment") -> bool:
        """Return whether another assignment has the same owners in the same order, compared by identity."""
        ours, theirs = [*self.owners, *self.blocks], [*other.owners, *other.blocks]
        is_as_long = self.batched is other.batched and len(ours) == len(theirs)
        return is_as_long and all(a is b for a, b in zip(ours, theirs, strict=True))


class TensorPlace(NamedTuple):
    """Place of a batched tensor in its section."""

    start: int
    numel: int  # of the tensor of one owner, of which `shape` and `strides` are, too
    gap: int  # numbers behind the tensor, which align the next one and are always 0
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Section:
    """Place of one batched module in flat memory."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.owners = len(assignment.owners)
        self.targets: list[tuple[BatchedLayer, str]] = []
        self.parameters: list[nn.Parameter] = []  # of all owners, by tensor, then by owner
        self.buffers: list[tuple[BatchedLayer, str, list[nn.Module]]] = []  # with the owners' layers
        for path, layer in assignment.batched.layers.items():
            owner_layers = [attrgetter(path)(owner) if path else owner for owner in assignment.owners]
            self.targets += [(layer, name) for name in layer.parameter_names]
            self.parameters += [getattr(own, name) for name in layer.parameter_names for own in owner_layers]
            self.buffers += [(layer, name, owner_layers) for name in layer.buffer_names]
        self.statistics = self.gather_statistics()  # [owners, …] each
        self.places: list[TensorPlace] = []
        self.size = 0
        for p in self.parameters[:: self.owners]:
            # Strides in p's memory format, without gaps.
            strides = torch.empty_like(p, device="meta").stride()
            gap = -self.owners * p.numel() % (ALIGNMENT // p.element_size())
            self.places.append(TensorPlace(self.size, p.numel(), gap, tuple(p.shape), strides))
            self.size += self.owners * p.numel() + gap

    def gather_statistics(self) -> list[Tensor]:
        """Return copies, [owners, …] each, of the owners' running statistics."""
        return [torch.stack([getattr(own, name) for own in owner_layers]) for _, name, owner_layers in self.buffers]

    def gather(self, tensors: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the numbers of one tensor per parameter as they lie in the section, with those in between."""
        for _, numel, gap, shape, strides in self.places:
            own = list(islice(tensors, self.owners))
            for tensor in own:
                if tensor.stride() != strides:
                    like = {"dtype": tensor.dtype, "device": tensor.device}
                    tensor = torch.empty_strided(shape, strides, **like).copy_(tensor)
                yield tensor.as_strided((numel,), (1,))
            if gap:
                yield own[0].new_zeros(gap)

    def views(self, numbers: Tensor) -> list[Tensor]:  # [size] -> [tensor] [owners, …]
        """Return views of the section's numbers, one for each batched tensor."""
        first = numbers.storage_offset()
        return [
            numbers.as_strided((self.owners, *shape), (numel, *strides), first + start)
            for start, numel, _, shape, strides in self.places
        ]

    def rows(self, numbers: Tensor) -> list[Tensor]:  # [size] -> one per parameter
        """Return views of the section's numbers, one for each parameter."""
        return [row for view in self.views(numbers) for row in view.unbind()]

    def owner_of_number(self) -> np.ndarray:  # [size] int32
        """Return the owner of each number; those between tensors belong to the owner of the number before."""
        sizes = [[place.numel] * (self.owners - 1) + [place.numel + place.gap] for place in self.places]
        owners = np.tile(np.arange(self.owners, dtype=np.int32), len(self.places))
        return np.repeat(owners, list(chain.from_iterable(sizes)))


class FlatWeights:
    """Copies of the weights of all hosts, then of all seeds, flat."""

    values: Tensor  # [numbers]
    grads: Tensor  # [numbers]; exists only after `bind` with `requires_grad`

    @torch.no_grad()
    def __init__(self, assignments: Sequence[Assignment]) -> None:
        self.sections = [Section(assignment) for assignment in assignments]
        self.values = self.gather(self.parameters)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of all owners, by section, then by tensor, then by owner."""
        return [p for section in self.sections for p in section.parameters]

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate one tensor per parameter, given in the order of `parameters`, to [numbers]."""
        given = iter(tensors)
        return torch.cat([part for section in self.sections for part in section.gather(given)])

    def split(self, numbers: Tensor) -> Sequence[Tensor]:
        """Return the part of each section, given all numbers."""
        return numbers.split([section.size for section in self.sections])

    def views(self, numbers: Tensor) -> list[list[Tensor]]:  # [section][tensor] [owners, …]
        """Return views of flat numbers, one for each tensor of each batched module."""
        return [section.views(part) for section, part in zip(self.sections, self.split(numbers), strict=True)]

    def bind(self, requires_grad: bool) -> None:
        """Bind weights and running statistics to the batched layers; the backward pass may accumulate into `grads`."""
        leaves = []
        for section, values in zip(self.sections, self.views(self.values), strict=True):
            for (layer, name), value in zip(section.targets, values, strict=True):
                layer.bound[name] = leaf = value.detach().requires_grad_(requires_grad)
                leaves.append(leaf)
            for (layer, name, _), statistic in zip(section.buffers, section.statistics, strict=True):
                layer.register_buffer(name, statistic)  # updated in place in training
        if requires_grad:
            self.grads = self.memory_of_grads()
            for leaf, grad in zip(leaves, chain.from_iterable(self.views(self.grads)), strict=True):
                leaf.grad = grad

    def memory_of_grads(self) -> Tensor:  # [numbers]
        return torch.zeros_like(self.values)


class Resident(Section):
    """Section whose owners live in it, with the state of their optimizers; keys of states end with `STEP`, if any."""

    def __init__(self, assignment: Assignment, optimizers: Sequence[Optimizer], state_names: Sequence[str]) -> None:
        super().__init__(assignment)
        self.optimizers, self.state_names = optimizers, state_names
        self.states = [optimizers[k % self.owners].state[p] for k, p in enumerate(self.parameters)]
        for p, state in zip(self.parameters, self.states, strict=True):
            for name in state_names:
                if name not in state:  # as torch.optim creates it at its first step
                    state[name] = torch.zeros_like(p)
                    if name == STEP:
                        state[name] = torch.zeros((), dtype=torch.float32, device=p.device)

    def length(self, name: str) -> int:
        """Return the length of the section in the flat tensor of this name."""
        return len(self.parameters) if name == STEP else self.size

    def settle(self, flat: dict[str, Tensor]) -> None:
        """Make the owners' tensors views of "values" and of states by key, which already hold their numbers."""
        for p, row in zip(self.parameters, self.rows(flat["values"]), strict=True):
            p.data = row
        self._state_rows = {n: list(flat[n].unbind()) if n == STEP else self.rows(flat[n]) for n in self.state_names}
        for name, rows in self._state_rows.items():
            for state, row in zip(self.states, rows, strict=True):
                state[name] = row
        for (_, name, owner_layers), batched in zip(self.buffers, self.statistics, strict=True):
            for owner_layer, row in zip(owner_layers, batched, strict=True):
                setattr(owner_layer, name, row)
        self._addresses = self._first_addresses()

    def is_in_place(self) -> bool:
        """Return whether the tensors of all owners still lie here, judged by the first tensor of each owner."""
        return self._addresses == self._first_addresses()

    def take_back_states(self) -> None:
        """Copy the state of optimizers that have loaded another one, as in a rollback, back into the section.

        An owner's optimizer is judged by the first moment of the owner's first parameter.
        """
        first = self.state_names[0]
        for owner, (optimizer, p) in enumerate(zip(self.optimizers, self.parameters, strict=False)):
            if optimizer.state.get(p, {}).get(first) is self._state_rows[first][owner]:
                continue
            for k in range(owner, len(self.parameters), self.owners):
                state = self.states[k] = optimizer.state[self.parameters[k]]
                for name, rows in self._state_rows.items():
                    row = rows[k].copy_(state[name]) if name in state else rows[k].zero_()
                    state[name] = row

    def _first_addresses(self) -> list[int]:
        tensors: list[Tensor] = [*self.parameters[: self.owners]]
        for _, name, owner_layers in self.buffers[:1]:
            tensors += [getattr(owner_layer, name) for owner_layer in owner_layers]
        return [tensor.data_ptr() for tensor in tensors]


class Arena(FlatWeights):
    """Weights, gradients, optimizer state and running statistics of all hosts and seeds in training.

    If the owners of a section change, this section and all behind it are laid out anew; those before it stay where they
    are. The hosts come first, so that a change of seeds moves no host. Memory for seeds grows by doubling.

    Attributes:
        states: Optimizer state by key: moments, [numbers] each, and step counts, [parameters].
        group_of_weight: Optimizer group of each number, [numbers] int32: all hosts first, then all seeds.
        group_of_parameter: Optimizer group of each parameter, [parameters] int64.
        first_parameters: Index of the first parameter of each group, [groups] int64.
    """

    def __init__(self) -> None:
        self.sections = self.residents = list[Resident]()
        self.states: dict[str, Tensor] = {}
        self._flat: dict[str, Tensor] = {}  # "values", "grads" and optimizer state, with room for more seeds

    def holds(self, assignments: Sequence[Assignment]) -> bool:
        """Return whether exactly these owners live in the arena."""
        return len(assignments) == len(self.residents) == self._kept(assignments)

    def _kept(self, assignments: Sequence[Assignment]) -> int:
        """Return how many of the first sections stay as they are."""
        for i, (section, assignment) in enumerate(zip(self.residents, assignments, strict=False)):
            if not (section.assignment.is_same(assignment) and section.is_in_place()):
                return i
        return min(len(self.residents), len(assignments))

    @torch.no_grad()
    def assign(
        self, assignments: Sequence[Assignment], optimizers: Sequence[Optimizer], state_names: Sequence[str]
    ) -> None:
        """Move these owners into the arena, with the states of their hosts' optimizers, and all others out of it."""
        kept = self._kept(assignments)
        for section in self.residents[:kept]:
            section.take_back_states()
        if kept == len(assignments) == len(self.residents):
            return
        # First all that needs memory: if there is too little, every tensor still has its numbers.
        arriving = [
            Resident(assignment, [optimizers[host] for host in assignment.hosts], state_names)
            for assignment in assignments[kept:]
        ]
        staying = {id(owner) for assignment in assignments[kept:] for owner in assignment.owners}
        for section in self.residents[kept:]:
            for owner, optimizer in zip(section.assignment.owners, section.optimizers, strict=True):
                if id(owner) not in staying:  # one that has moved to another arena leaves that, and returns to it
                    leave_arena(owner, optimizer)
        gathered = _gather(arriving, state_names) if arriving else {}
        has_moved = self._reserve(kept, arriving, gathered)
        starts = {name: self._start(name, kept) for name in gathered}
        self.sections = self.residents = [*self.residents[:kept], *arriving]
        for name, numbers in gathered.items():
            self._flat[name][starts[name] :][: len(numbers)] = numbers
        used = {name: flat[: self._start(name, len(self.residents))] for name, flat in self._flat.items()}
        self.values, self._grads = used["values"], used.pop("grads")
        parts = {name: flat.split([s.length(name) for s in self.residents]) for name, flat in used.items()}
        self.states = {name: used[name] for name in state_names}
        self._describe_groups()
        for i, section in enumerate(self.residents):
            if has_moved or i >= kept:
                section.settle({name: part[i] for name, part in parts.items()})

    def _reserve(self, kept: int, arriving: Sequence[Resident], gathered: dict[str, Tensor]) -> bool:
        """Make room for arriving sections behind the kept ones. Returns whether the kept ones have moved."""
        needed = {name: self._start(name, kept) + len(numbers) for name, numbers in gathered.items()}
        # Other hosts get other memory: a host that left may be all that lies in the present one.
        if kept and all(needed[name] <= len(self._flat[name]) for name in needed):
            return False
        hosts = self.residents[0] if kept else arriving[0]
        larger: dict[str, Tensor] = {}
        for name, numbers in gathered.items():
            larger[name] = numbers.new_zeros(2 * needed[name] - hosts.length(name))
            if kept:
                start = self._start(name, kept)
                larger[name][:start] = self._flat[name][:start]
        self._flat = larger | {"grads": torch.zeros_like(larger["values"])}
        return True

    def _start(self, name: str, kept: int) -> int:
        """Return where the numbers behind the first `kept` sections begin."""
        return sum(section.length(name) for section in self.residents[:kept])

    def _describe_groups(self) -> None:
        """Number the groups of the optimizer, one for each owner in the order of sections, and map weights to them."""
        device = self.values.device
        first_groups = accumulate((section.owners for section in self.residents), initial=0)
        first_parameters = accumulate((len(section.parameters) for section in self.residents), initial=0)
        sections = list(zip(self.residents, first_groups, first_parameters, strict=False))
        self.group_of_weight = upload(np.concatenate([first + s.owner_of_number() for s, first, _ in sections]), device)
        # Parameters of a section lie by tensor, then by owner.
        of_parameter = [first + k % s.owners for s, first, _ in sections for k in range(len(s.parameters))]
        self.group_of_parameter = upload(of_parameter, device)
        self.first_parameters = upload([first + i for s, _, first in sections for i in range(s.owners)], device)

    def memory_of_grads(self) -> Tensor:
        return self._grads


def _gather(sections: Sequence[Resident], state_names: Sequence[str]) -> dict[str, Tensor]:
    """Return the numbers of arriving sections by name, copied from wherever they are."""
    gathered = {"values": torch.cat([part for s in sections for part in s.gather(iter(s.parameters))])}
    for name in state_names:
        states = ((s, (state[name] for state in s.states)) for s in sections)
        parts = (own if name == STEP else s.gather(own) for s, own in states)
        gathered[name] = (torch.stack if name == STEP else torch.cat)(list(chain.from_iterable(parts)))
    return gathered


@torch.no_grad()
def leave_arena(network: nn.Module, optimizer: Optimizer) -> None:
    """Give the parameters, statistics and optimizer state of a host or seed that lives in an arena their own memory."""
    for p in network.parameters():
        if _is_part(p):
            p.data = p.detach().clone()
        state = optimizer.state.get(p, {})
        state.update({name: value.clone() for name, value in state.items() if _is_part(value)})
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if _is_part(buffer):
                setattr(module, name, buffer.clone())


def _is_part(value: object) -> bool:
    """Return whether a tensor is part of a larger memory."""
    return isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes
