"""Flat memory of the weights of N hosts and all their seeds, so that one kernel updates all of them.

A *batched module* computes all hosts, or all seeds of one kind in one slot; its *owners* are these hosts or seeds.
Their numbers lie in a *section*: by tensor, then by owner.

Hosts in training live in the `Arena`: their parameters, optimizer state and running statistics are views of its rows,
so that an epoch neither gathers them nor writes them back. Before each epoch the arena looks which of these tensors are
still its rows. What has moved meanwhile is copied back: an optimizer state that was loaded, or a host that was trained
in another arena.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

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
    """A batched module with its owners in the coming epoch. Equal ones have the same modules, as objects."""

    batched: BatchedModule
    owners: Sequence[nn.Module]
    hosts: Sequence[int]  # index of the host that each owner is, or grows in
    blocks: Sequence[nn.Module] = ()  # parts of the owners that may be replaced: those of lists that grow in depth


class TensorPlace(NamedTuple):
    """Place of a batched tensor in its section."""

    start: int
    numel: int  # of the tensor of one owner, of which `shape` and `strides` are, too
    gap: int  # numbers behind the tensor, which align the next one and are always 0
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Buffer(NamedTuple):
    """Running statistic of a batched layer."""

    layer: BatchedLayer
    name: str
    owner_layers: list[nn.Module]  # the same layer of each owner


class Section:
    """Place of one batched module in flat memory, with the optimizer states of its owners if they are given.

    Attributes:
        targets: Batched layer and name of each batched tensor.
        parameters: Parameters of all owners, by tensor, then by owner.
        states: State of the owner's optimizer for each parameter.
        statistics: Running statistics of all owners, [owners, …] each.
    """

    def __init__(
        self, assignment: Assignment, optimizers: Sequence[Optimizer] = (), state_names: Sequence[str] = ()
    ) -> None:
        self.assignment, self.optimizers, self.state_names = assignment, optimizers, state_names
        self.owners = len(assignment.owners)
        self.targets: list[tuple[BatchedLayer, str]] = []
        self.parameters: list[nn.Parameter] = []
        self.buffers: list[Buffer] = []
        for path, layer in assignment.batched.layers.items():
            owner_layers = [attrgetter(path)(owner) if path else owner for owner in assignment.owners]
            self.targets += [(layer, name) for name in layer.parameter_names]
            self.parameters += [getattr(own, name) for name in layer.parameter_names for own in owner_layers]
            self.buffers += [Buffer(layer, name, owner_layers) for name in layer.buffer_names]
        self.statistics = self.gather_statistics()
        self.places: list[TensorPlace] = []
        self.size = 0  # numbers of all owners' parameters, with gaps
        for p in self.parameters[:: self.owners]:
            # Strides in p's memory format, without gaps.
            strides = torch.empty_like(p, device="meta").stride()
            gap = -self.owners * p.numel() % (ALIGNMENT // p.element_size())
            self.places.append(TensorPlace(self.size, p.numel(), gap, tuple(p.shape), strides))
            self.size += self.owners * p.numel() + gap
        self.states: list[dict[str, Tensor]] = []
        for k, p in enumerate(self.parameters if optimizers else ()):
            self.states.append(state := optimizers[k % self.owners].state[p])
            for name in state_names:
                if name not in state:  # as torch.optim creates it at its first step
                    count = torch.zeros((), dtype=torch.float32, device=p.device)
                    state[name] = count if name == STEP else torch.zeros_like(p)

    def gather_statistics(self) -> list[Tensor]:
        """Return copies, [owners, …] each, of the owners' running statistics."""
        return [torch.stack([getattr(own, name) for own in owner_layers]) for _, name, owner_layers in self.buffers]

    def gather(self, tensors: Iterable[Tensor]) -> Tensor:  # [size]
        """Copy one tensor per parameter to flat memory."""
        tensors, parts = iter(tensors), []
        for place in self.places:
            for tensor in islice(tensors, self.owners):
                if tensor.stride() != place.strides:
                    like = {"dtype": tensor.dtype, "device": tensor.device}
                    tensor = torch.empty_strided(place.shape, place.strides, **like).copy_(tensor)
                parts.append(tensor.as_strided((place.numel,), (1,)))
            parts.append(parts[-1].new_zeros(place.gap))
        return torch.cat(parts)

    def gather_all(self) -> dict[str, Tensor]:
        """Copy "values", the parameters, and states by key to flat memory; step counts are [parameters]."""
        gathered = {"values": self.gather(self.parameters)}
        for name in self.state_names:
            tensors = [state[name] for state in self.states]
            gathered[name] = torch.stack(tensors) if name == STEP else self.gather(tensors)
        return gathered

    def length(self, name: str) -> int:
        """Return the length of the section in the flat tensor of this name."""
        return len(self.parameters) if name == STEP else self.size

    def views(self, numbers: Tensor) -> list[Tensor]:  # [size] -> [tensor] [owners, …]
        """Return views of the section's numbers, one for each batched tensor."""
        first = numbers.storage_offset()
        return [
            numbers.as_strided((self.owners, *place.shape), (place.numel, *place.strides), first + place.start)
            for place in self.places
        ]

    def rows(self, name: str, numbers: Tensor) -> list[Tensor]:
        """Return views of the section's part of the flat tensor of this name, one for each parameter."""
        return [row for view in ([numbers] if name == STEP else self.views(numbers)) for row in view.unbind()]

    def settle(self, flat: dict[str, Tensor]) -> None:
        """Make the owners' tensors views of "values" and of states by key, which already hold their numbers."""
        for p, row in zip(self.parameters, self.rows("values", flat["values"]), strict=True):
            p.data = row
        # By name of a state, such as "exp_avg": views of its flat tensor, one for each parameter.
        self._state_rows = {name: self.rows(name, flat[name]) for name in self.state_names}
        for name, rows in self._state_rows.items():
            for state, row in zip(self.states, rows, strict=True):
                state[name] = row
        for buffer, batched in zip(self.buffers, self.statistics, strict=True):
            for owner_layer, row in zip(buffer.owner_layers, batched, strict=True):
                setattr(owner_layer, buffer.name, row)
        self._addresses = self._first_addresses()

    def is_in_place(self) -> bool:
        """Return whether the tensors of all owners still lie here, judged by the first tensor of each owner."""
        return self._addresses == self._first_addresses()

    def _first_addresses(self) -> list[int]:
        tensors: list[Tensor] = [*self.parameters[: self.owners]]
        for _, name, owner_layers in self.buffers[:1]:
            tensors += [getattr(owner_layer, name) for owner_layer in owner_layers]
        return [tensor.data_ptr() for tensor in tensors]

    def take_back_states(self) -> None:
        """Copy the state of optimizers that have loaded another one, as in a rollback, back into the section.

        Loading replaces all tensors of an optimizer, so one tells: the first state of the owner's first parameter. The
        first `owners` parameters are the first ones of each owner, and each `owners`-th one is of the same owner.
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


class FlatWeights:
    """Copies of the weights of all hosts, then of all seeds, flat."""

    values: Tensor  # [numbers]
    grads: Tensor  # [numbers]; in copies only after `bind` with `requires_grad`

    @torch.no_grad()
    def __init__(self, assignments: Sequence[Assignment]) -> None:
        self.sections = [Section(assignment) for assignment in assignments]
        self.grads = torch.empty(0)
        if assignments:
            self.values = self.gather(self.parameters)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of all owners, by section, then by tensor, then by owner."""
        return [p for section in self.sections for p in section.parameters]

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate one tensor per parameter, given in the order of `parameters`, to [numbers]."""
        given = iter(tensors)
        return torch.cat([section.gather(islice(given, len(section.parameters))) for section in self.sections])

    def views(self, numbers: Tensor) -> list[list[Tensor]]:  # [section][tensor] [owners, …]
        """Return views of flat numbers, one for each tensor of each batched module."""
        parts = numbers.split([section.size for section in self.sections])
        return [section.views(part) for section, part in zip(self.sections, parts, strict=True)]

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
            if len(self.grads) != len(self.values):
                self.grads = torch.zeros_like(self.values)
            for leaf, grad in zip(leaves, chain.from_iterable(self.views(self.grads)), strict=True):
                leaf.grad = grad


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
        super().__init__([])
        self.states: dict[str, Tensor] = {}
        self._flat: dict[str, Tensor] = {}  # "values", "grads" and optimizer state, with room for more seeds

    def holds(self, assignments: Sequence[Assignment]) -> bool:
        """Return whether exactly these owners live in the arena."""
        return len(assignments) == len(self.sections) == self._num_kept(assignments)

    def _num_kept(self, assignments: Sequence[Assignment]) -> int:
        """Return how many of the first sections stay as they are."""
        for i, (section, assignment) in enumerate(zip(self.sections, assignments, strict=False)):
            if section.assignment != assignment or not section.is_in_place():
                return i
        return min(len(self.sections), len(assignments))

    @torch.no_grad()
    def assign(
        self, assignments: Sequence[Assignment], optimizers: Sequence[Optimizer], state_names: Sequence[str]
    ) -> None:
        """Move these owners into the arena, with the states of their hosts' optimizers, and all others out of it."""
        kept = self.sections[: self._num_kept(assignments)]
        for section in kept:
            section.take_back_states()
        if len(kept) == len(assignments) == len(self.sections):
            return
        # First all that needs memory: if there is too little, every tensor still has its numbers.
        changed = assignments[len(kept) :]
        arriving = [Section(one, [optimizers[host] for host in one.hosts], state_names) for one in changed]
        staying = {id(owner) for assignment in changed for owner in assignment.owners}
        for section in self.sections[len(kept) :]:
            for owner, optimizer in zip(section.assignment.owners, section.optimizers, strict=True):
                if id(owner) not in staying:  # one that has moved to another arena leaves that, and returns to it
                    leave_arena(owner, optimizer)
        names = ["values", *state_names]
        start = {name: sum(section.length(name) for section in kept) for name in names}
        numbers = [section.gather_all() for section in arriving]
        new = {name: torch.cat([part[name] for part in numbers]) for name in names if numbers}
        end = {name: start[name] + (len(new[name]) if new else 0) for name in names}
        # Other hosts get other memory: a host that left may be all that lies in the present one.
        has_moved = not kept or any(end[name] > len(self._flat[name]) for name in names)
        if has_moved:
            hosts = (kept or arriving)[0]
            room = {name: new[name].new_zeros(2 * end[name] - hosts.length(name)) for name in names}
            for name in names if kept else ():
                room[name][: start[name]] = self._flat[name][: start[name]]
            self._flat = room | {"grads": torch.zeros_like(room["values"])}
        for name, part in new.items():
            self._flat[name][start[name] : end[name]] = part
        self.sections = [*kept, *arriving]
        self.values, self.grads = (self._flat[name][: end["values"]] for name in ("values", "grads"))
        self.states = {name: self._flat[name][: end[name]] for name in state_names}
        first = dict.fromkeys(names, 0)
        for section in self.sections:
            part = {name: self._flat[name][first[name] :][: section.length(name)] for name in names}
            if has_moved or section not in kept:
                section.settle(part)
            first = {name: first[name] + section.length(name) for name in names}
        self._number_groups()

    def _number_groups(self) -> None:
        """Number the owners in the order of sections: each is a group of the optimizer. Map numbers to groups."""
        lengths, group_of_parameter, first_parameters, num_groups = [], [], [], 0
        for section in self.sections:
            first_parameters += range(len(group_of_parameter), len(group_of_parameter) + section.owners)
            for place in section.places:
                lengths += [place.numel] * (section.owners - 1) + [place.numel + place.gap]
                group_of_parameter += range(num_groups, num_groups + section.owners)
            num_groups += section.owners
        device = self.values.device
        self.group_of_parameter = upload(group_of_parameter, device)
        # On the device: an upload would pin four bytes for each weight. With its length known, a GPU need not be read.
        self.group_of_weight = torch.repeat_interleave(
            self.group_of_parameter.int(), upload(lengths, device), output_size=len(self.values)
        )
        self.first_parameters = upload(first_parameters, device)


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
