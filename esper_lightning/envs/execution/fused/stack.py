"""N hosts as one network: the host's own code on stacked features, with the weights of all hosts and seeds."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from esper_lightning.envs.execution.fused.arena import Arena, Program, Staffed
from esper_lightning.envs.execution.fused.bank import Bank, StackedSlot
from esper_lightning.envs.execution.fused.layers import stacked
from esper_lightning.envs.execution.fused.members import Members, stack_inputs, unstack_outputs
from esper_lightning.envs.execution.fused.views import Views
from esper_lightning.envs.transfer import upload
from esper_lightning.growth.attach import attach_known, attachments, detach_slots
from esper_lightning.growth.counterfactual import Variant
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.slot import SeedSlot


class HostStack:
    """Stack of many hosts of one architecture.

    Args:
        host: One of the hosts; its seeds are ignored.

    Raises ValueError if a layer cannot be stacked.
    """

    def __init__(self, host: nn.Module) -> None:
        self.members = Members()
        self.views = Views()
        self.slots: dict[str, StackedSlot] = {}
        with torch.inference_mode(False):
            network = deepcopy(host)
        known = attachments(network)
        if known:
            detach_slots(network)  # from layers that are about to be replaced
        self.network = stacked(network, self.members).eval()
        attach_known(self.network, known)
        self.program = Program(self.network)
        for name, slot in slots_of(self.network).items():
            slot.empty()
            self.slots[name] = slot.branch = StackedSlot(self.members, self.views)
            slot.seed, slot.folded = slot.branch.seeds, None
        self.programs: dict[Bank, Program] = {}
        self.staff: list[Staffed] = []
        self.known: list[nn.Module] = []  # the hosts of the last `load`; below the layers and slots of each
        self.layers: list[list[nn.Module]] = []
        self.found: list[dict[str, SeedSlot]] = []

    def load(self, hosts: Sequence[nn.Module]) -> Arena:
        """Assign N hosts with their seeds. Returns their flat weights, on which training continues."""
        self.release()
        if len(self.known) != len(hosts) or any(a is not b for a, b in zip(hosts, self.known, strict=True)):
            self.known, self.found = list(hosts), [slots_of(host) for host in hosts]
            self.layers = [self.program.find(host) for host in hosts]
        self.count = len(hosts)
        self.staff = [Staffed(self.program, self.layers)]
        self.grown: list[list[tuple[int, str]]] = []  # (host index, slot name) of each seed, by stacked seeds
        for name, slot in self.slots.items():
            slot.fill([slots[name] for slots in self.found])
            for bank in slot.banks:
                if bank not in self.programs:
                    self.programs[bank] = Program(bank.seed)
                program = self.programs[bank]
                self.staff.append(Staffed(program, [program.find(self.found[host][name].seed) for host in bank.row]))
                self.grown.append([(host, name) for host in bank.row])
        return Arena(self.staff)

    def release(self) -> None:
        """Drop all weights and assignments, and so their memory."""
        for program, _ in self.staff:
            program.release()
        for slot in self.slots.values():
            slot.release()
        self.members.all(0)
        self.staff = []

    def train(self, inputs: Tensor) -> Tensor:  # [N·B, …], host by host -> [N·B, …]
        """Run the N hosts in training mode, each on its own minibatch."""
        self._mode(True)
        self.members.all(self.count)
        return self._run(inputs, self.count)

    def evaluate(
        self, inputs: Tensor, variants: Sequence[Sequence[Variant]], own: Sequence[int] | None = None
    ) -> Tensor:  # [B, …] -> [G·B, …]
        """Run the same inputs through every host with each of its combinations of seeds; see `StackEntries`.

        Args:
            inputs: Inputs shared by all hosts; or [M, B, …], M variants of them.
            variants: Combinations of seeds, [N][V].
            data_variants: Variant of the inputs for each host, [N]; None if there is only one.
        """
        self._mode(False)
        off_trunk = {name: slot.blended for name, slot in self.slots.items() if not self.found[0][name].trunk}
        self.views.begin(variants, off_trunk)
        if self.views.hosts == list(range(self.count)):
            self.members.all(self.count)
        else:
            self.members.some(upload(self.views.hosts, inputs.device))
        if own is None:
            return self._run(inputs.repeat(self.views.count, *[1] * (inputs.ndim - 1)), self.views.count)
        seen = upload([own[host] for host in self.views.hosts], inputs.device)
        return self._run(inputs.index_select(0, seen).flatten(0, 1), self.views.count)

    def _mode(self, training: bool) -> None:
        """Set the training mode of the modules where it changes, because a call visits many modules."""
        for program, _ in self.staff:
            if program.module.training != training:
                program.module.train(training)

    def _run(self, inputs: Tensor, count: int) -> Tensor:
        samples = len(inputs) // count
        outputs = self.network(stack_inputs(inputs, count))
        return unstack_outputs(outputs, self.members.count, samples)
