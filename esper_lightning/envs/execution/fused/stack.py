"""N hosts as one network: the host's own code on stacked features, with the present weights of all hosts and seeds."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from esper_lightning.envs.execution.fused.arena import Arena, Program, Staffed
from esper_lightning.envs.execution.fused.bank import Bank, StackedSlot
from esper_lightning.envs.execution.fused.layers import stacked
from esper_lightning.envs.execution.fused.members import Members, stack_inputs, unstack_outputs
from esper_lightning.envs.execution.fused.views import Views
from esper_lightning.growth.counterfactual import Variant
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.slot import SeedSlot


class HostStack:
    """Many hosts of one architecture.

    Args:
        host: One of them; its slots are empty.

    Raises ValueError if a layer cannot be stacked.
    """

    def __init__(self, host: nn.Module) -> None:
        self.members = Members()
        self.views = Views()
        network = deepcopy(host)
        self.slots = {name: StackedSlot(slot, self.members, self.views) for name, slot in slots_of(network).items()}
        for parent in list(network.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, SeedSlot):
                    setattr(parent, name, self.slots[child.name])
        self.network = stacked(network, self.members)
        self.program = Program(self.network)
        self.programs: dict[Bank, Program] = {}
        self.found: list[dict[str, SeedSlot]] = []

    def load(self, hosts: Sequence[nn.Module]) -> Arena:
        """Takes in the weights of N hosts and their seeds, and who has grown what; learning goes on in the arena."""
        self.hosts = hosts
        if len(self.found) != len(hosts) or any(host is not known for host, known in zip(hosts, self._of, strict=True)):
            self.found, self._of = [slots_of(host) for host in hosts], list(hosts)
        self.staff = staff = [Staffed(self.program, hosts)]
        self.grown: list[list[tuple[int, str]]] = []  # for each bank, its members: host and slot
        for name, slot in self.slots.items():
            slot.fill([slots[name] for slots in self.found])
            for bank in slot.banks.values():
                if bank not in self.programs:
                    self.programs[bank] = Program(bank.seed)
                staff.append(Staffed(self.programs[bank], [self.found[host][name].seed for host in bank.row]))
                self.grown.append([(host, name) for host in bank.row])
        return Arena(staff)

    def train(self, inputs: Tensor) -> Tensor:  # [N·B, …], host by host -> [N·B, …]
        """One pass in training mode."""
        self._mode(True)
        self.members.all(len(self.hosts))
        return self._run(inputs, len(self.hosts))

    def evaluate(self, inputs: Tensor, variants: Sequence[Sequence[Variant]]) -> Tensor:  # [B, …] -> [G·B, …]
        """One pass of the same inputs through every host with each of its combinations of seeds: see `views`."""
        self._mode(False)
        off_trunk = [
            (name, slot.blended) for name, slot in self.slots.items() if slot.blended and not self.found[0][name].trunk
        ]
        self.views.begin(variants, off_trunk)
        if off_trunk:
            self.members.some(torch.tensor(self.views.hosts, device=inputs.device))
        else:
            self.members.all(len(self.hosts))
        return self._run(inputs.repeat(self.views.count, *[1] * (inputs.ndim - 1)), self.views.count)

    def _mode(self, training: bool) -> None:
        """Only where it changes: there are many modules."""
        for program, _ in self.staff:
            if program.module.training != training:
                program.module.train(training)

    def _run(self, inputs: Tensor, count: int) -> Tensor:
        samples = len(inputs) // count
        outputs = self.network(stack_inputs(inputs, count))
        return unstack_outputs(outputs, self.members.count, samples)
