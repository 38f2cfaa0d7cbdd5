"""Arena: the memory that holds stacked hosts between epochs.

Parameters, optimizer state and running statistics of hosts and seeds are views of rows of the arena, so that an epoch
neither gathers them nor writes them back. Before each epoch the arena compares the addresses of these tensors with
those of its rows. What has moved meanwhile is copied back into the arena: an optimizer state that was loaded, or a host
that was trained in another arena.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_lightning.envs.device_transfer import upload
from esper_lightning.envs.executors.fused.flat_params import Assignment, FlatParameters, Section

STEP = "step"
"""State key of a parameter's step count, which is a single number."""

State = dict[str, Tensor]
"""Optimizer state of one parameter."""


class _Residents(Section):
    """Section whose owners live in it.

    Args:
        assignment: The owners.
        optimizers: Optimizer of each owner.
        state_names: Keys of the optimizer state, with `STEP` last if steps are counted.
    """

    def __init__(self, assignment: Assignment, optimizers: Sequence[Optimizer], state_names: Sequence[str]) -> None:
        super().__init__(assignment)
        self.optimizers = optimizers
        self.state_names = state_names
        self.states = [self._state_of(k) for k in range(len(self.parameters))]
        self.buffers = assignment.buffers()
        self.stacked_buffers: list[Tensor] = []
        # A parameter in another memory format than that of the rows leaves the arena after each epoch.
        self.formats = {k: p.stride() for k, p in enumerate(self.parameters) if not p.is_contiguous()}
        self._addresses: list[int] = []
        self._state_addresses: list[int] = []

    def _state_of(self, k: int) -> State:
        """Return the optimizer state of a parameter, with what torch.optim would create at its first step."""
        if not self.state_names:
            return {}
        p = self.parameters[k]
        state: State = self.optimizers[k % self.owners].state[p]
        for name in self.state_names:
            if name not in state:
                state[name] = (
                    torch.zeros((), dtype=torch.float32, device=p.device)
                    if name == STEP
                    else torch.zeros_like(p, memory_format=torch.preserve_format)
                )
        return state

    def length(self, name: str) -> int:
        """Return the length of the section in the flat tensor of this name."""
        return len(self.parameters) if name == STEP else self.size

    @property
    def in_place(self) -> bool:
        """True if the tensors of all owners still lie in this arena, judged by the first tensor of each owner."""
        return not self.formats and self._addresses == self._first_addresses()

    def _first_addresses(self) -> list[int]:
        tensors: list[Tensor] = [*self.parameters[: self.owners]]
        for _, name, owner_layers in self.buffers[:1]:
            tensors += [getattr(owner_layer, name) for owner_layer in owner_layers]
        return [tensor.data_ptr() for tensor in tensors]

    def stack_buffers(self) -> None:
        """Stack copies of the running statistics; `settle` makes the owners' statistics views of them."""
        self.stacked_buffers = [buffer.gather() for buffer in self.buffers]

    def settle(self, values: Tensor, states: dict[str, Tensor]) -> None:
        """Make the owners' tensors views of these numbers, which already hold their values.

        Args:
            values: Weights, [size].
            states: Optimizer state by key, [size] each; of `STEP` one number per parameter.
        """
        for p, row in zip(self.parameters, self.rows(values), strict=True):
            p.data = row
        for name, numbers in states.items():
            for state, row in zip(self.states, self._state_rows(name, numbers), strict=True):
                state[name] = row
        for (_, name, owner_layers), stacked in zip(self.buffers, self.stacked_buffers, strict=True):
            for owner_layer, row in zip(owner_layers, stacked, strict=True):
                setattr(owner_layer, name, row)
        self._addresses = self._first_addresses()
        self._state_addresses = [state[self.state_names[0]].data_ptr() for state in self._first_states()]

    def _first_states(self) -> list[State]:
        return self.states[: self.owners] if self.state_names else []

    def _state_rows(self, name: str, numbers: Tensor) -> Iterable[Tensor]:
        return numbers.unbind() if name == STEP else self.rows(numbers)

    def take_back_state(self, states: dict[str, Tensor]) -> None:
        """Copy the state of optimizers that have loaded another one into these numbers; see `settle`."""
        replaced = [i for i, address in enumerate(self._state_addresses) if self._first_state_address(i) != address]
        if not replaced:
            return
        for i in replaced:
            for k in range(i, len(self.parameters), self.owners):
                self.states[k] = self._state_of(k)
        for name, numbers in states.items():
            rows = list(self._state_rows(name, numbers))
            for i in replaced:
                for k in range(i, len(rows), self.owners):
                    rows[k].copy_(self.states[k][name])
                    self.states[k][name] = rows[k]

    def _first_state_address(self, owner: int) -> int | None:
        state = self.optimizers[owner].state.get(self.parameters[owner], {})
        return state[self.state_names[0]].data_ptr() if self.state_names[0] in state else None

    def restore_formats(self) -> None:
        """Give parameters in another memory format than that of the rows memory of their own."""
        for k, strides in self.formats.items():
            p = self.parameters[k]
            p.data = torch.empty_strided(p.shape, strides, dtype=p.dtype, device=p.device).copy_(p.data)
            for name in self.state_names:
                if name != STEP:
                    self.states[k][name] = torch.empty_like(p.data).copy_(self.states[k][name])


class Arena(FlatParameters):
    """Weights, gradients, optimizer state and running statistics of all hosts and seeds, as flat as `FlatParameters`.

    If the owners of a stacked module change, this module and all behind it are laid out anew; those before it stay
    where they are. The hosts come first, so that a change of seeds moves no host. Memory for seeds grows by doubling.

    Attributes:
        states: Optimizer state by key: moments, [numbers] each, and step counts, [parameters].
        group_of_weight: Optimizer group of each number, [numbers] int32: all hosts first, then all seeds.
        group_of_parameter: Optimizer group of each parameter, [parameters] int64.
        first_parameters: Index of the first parameter of each group, [groups] int64.
    """

    def __init__(self) -> None:
        self.sections = self.residents = list[_Residents]()
        self.states: dict[str, Tensor] = {}
        self._flat: dict[str, Tensor] = {}  # "values", "grads" and optimizer state, with room for more seeds

    def holds(self, assignments: Sequence[Assignment]) -> bool:
        """Return whether exactly these owners live in the arena."""
        return len(assignments) == len(self.residents) == self._kept(assignments)

    def _kept(self, assignments: Sequence[Assignment]) -> int:
        """Return how many of the first sections stay as they are."""
        for i, (section, assignment) in enumerate(zip(self.residents, assignments, strict=False)):
            if not (section.assignment.is_same(assignment) and section.in_place):
                return i
        return min(len(self.residents), len(assignments))

    @torch.no_grad()
    def assign(
        self, assignments: Sequence[Assignment], optimizers: Sequence[Optimizer], state_names: Sequence[str]
    ) -> None:
        """Move these owners into the arena, and all others out of it.

        Args:
            assignments: The stacked host with its owners first, then the stacked seeds.
            optimizers: Optimizer of each host, by host index.
            state_names: Keys of the optimizer state, with `STEP` last if steps are counted.
        """
        kept = self._kept(assignments)
        if kept < max(len(assignments), len(self.residents)):
            arriving = [
                _Residents(assignment, [optimizers[host] for host in assignment.hosts], state_names)
                for assignment in assignments[kept:]
            ]
            self._lay_out(kept, arriving)
        for section, _, states in self._places()[:kept]:
            section.take_back_state(states)

    def _lay_out(self, kept: int, arriving: Sequence[_Residents]) -> None:
        """Replace all but the first `kept` sections."""
        # First all that needs memory: if there is too little, every tensor still has its numbers.
        staying = {id(owner) for section in arriving for owner in section.assignment.owners}
        for section in self.residents[kept:]:
            for owner, optimizer in zip(section.assignment.owners, section.optimizers, strict=True):
                if id(owner) not in staying:
                    leave_arena(owner, optimizer)
        gathered = _gather(arriving)
        is_moved = self._reserve(kept, arriving, gathered)
        starts = {name: self._start(name, kept) for name in gathered}
        self.sections = self.residents = [*self.residents[:kept], *arriving]
        for name, numbers in gathered.items():
            self._flat[name][starts[name] :][: len(numbers)] = numbers
        used = {name: flat[: self._start(name, len(self.residents))] for name, flat in self._flat.items()}
        self.values, self._grads = used.pop("values"), used.pop("grads")
        self.states = used
        self._describe_groups()
        for section, values, states in self._places()[0 if is_moved else kept :]:
            section.settle(values, states)

    def _reserve(self, kept: int, arriving: Sequence[_Residents], gathered: dict[str, Tensor]) -> bool:
        """Make room for arriving sections behind the kept ones. Returns whether the kept ones have moved."""
        needed = {name: self._start(name, kept) + len(numbers) for name, numbers in gathered.items()}
        # Other hosts get other memory: a host that left may be all that lies in the present one.
        if kept and all(needed[name] <= len(self._flat[name]) for name in needed):
            return False
        hosts = self.residents[0] if kept else arriving[0]
        larger: dict[str, Tensor] = {}
        for name, numbers in gathered.items():
            of_hosts = hosts.length(name)
            larger[name] = numbers.new_zeros(of_hosts + 2 * (needed[name] - of_hosts))
            if kept:
                start = self._start(name, kept)
                larger[name][:start] = self._flat[name][:start]
        larger["grads"] = torch.zeros_like(larger["values"])
        self._flat = larger
        return True

    def _start(self, name: str, kept: int) -> int:
        """Return where the numbers behind the first `kept` sections begin."""
        return sum(section.length(name) for section in self.residents[:kept])

    def _places(self) -> list[tuple[_Residents, Tensor, dict[str, Tensor]]]:
        """Return each section with its weights and its optimizer state."""
        parts = {
            name: numbers.split([section.length(name) for section in self.residents])
            for name, numbers in self.states.items()
        }
        return [
            (section, values, {name: own[i] for name, own in parts.items()})
            for i, (section, values) in enumerate(zip(self.residents, self.split(self.values), strict=True))
        ]

    def _describe_groups(self) -> None:
        device = self.values.device
        first_groups = accumulate((section.owners for section in self.residents), initial=0)
        first_parameters = accumulate((len(section.parameters) for section in self.residents), initial=0)
        sections = list(zip(self.residents, first_groups, first_parameters, strict=False))
        self.group_of_weight = upload(np.concatenate([first + s.owner_of_number() for s, first, _ in sections]), device)
        of_parameter = [first + k % s.owners for s, first, _ in sections for k in range(len(s.parameters))]
        self.group_of_parameter = upload(of_parameter, device)
        self.first_parameters = upload([first + i for s, _, first in sections for i in range(s.owners)], device)

    def new_grads(self) -> Tensor:
        return self._grads

    def bind_buffers(self) -> None:
        for section in self.residents:
            for buffer, stacked in zip(section.buffers, section.stacked_buffers, strict=True):
                buffer.bind(stacked)

    @torch.no_grad()
    def restore_formats(self) -> None:
        """Give parameters in another memory format than that of the rows memory of their own."""
        for section in self.residents:
            section.restore_formats()


def _gather(sections: Sequence[_Residents]) -> dict[str, Tensor]:
    """Return the numbers of arriving sections by name, copied from wherever they are, and stack their statistics."""
    if not sections:
        return {}
    for section in sections:
        section.stack_buffers()
    gathered = {"values": torch.cat([part for s in sections for part in s.padded(iter(s.parameters))])}
    for name in sections[0].state_names:
        if name == STEP:
            gathered[name] = torch.stack([state[name] for s in sections for state in s.states])
        else:
            moments = ((s, (state[name] for state in s.states)) for s in sections)
            gathered[name] = torch.cat([part for s, own in moments for part in s.padded(own)])
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
