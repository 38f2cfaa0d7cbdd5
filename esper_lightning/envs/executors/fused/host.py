"""N hosts as one network: the host's own code on batched features, with the weights of all hosts and seeds."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_lightning.envs.executors.fused.flat import Arena, Assignment, BatchedModule, FlatWeights
from esper_lightning.envs.executors.fused.layers import RowIndex, batch_inputs, batch_layers, unbatch_outputs
from esper_lightning.envs.executors.fused.slot import BatchedSlot, Entries
from esper_lightning.envs.measurements import upload
from esper_lightning.growth.attach import attach_at, attached_places, detach_slots
from esper_lightning.growth.counterfactual import SeedVariant
from esper_lightning.growth.depth import DepthSlot, depths
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import SeedSlot


class BatchedHosts:
    """Many hosts of one kind as one network, given one of them. Raises ValueError if a layer cannot be batched."""

    def __init__(self, host: nn.Module) -> None:
        self.index = RowIndex()
        self.entries = Entries()
        with torch.inference_mode(False):
            network = deepcopy(host)
        attached = attached_places(network)
        if attached:
            detach_slots(network)  # from layers that are about to be replaced
        self.network = batch_layers(network, self.index).eval()
        attach_at(self.network, attached)
        self.batched_host = BatchedModule(self.network)
        self.depths = depths(slots_of(self.network).values())
        self.slots: dict[str, BatchedSlot] = {}
        for name, slot in slots_of(self.network).items():
            if not isinstance(slot, DepthSlot):
                slot.empty()
                self.slots[name] = slot.override = BatchedSlot(self.index, self.entries)
                slot.seed, slot.folded = slot.override.seed_modules, None
        self.assignments: list[Assignment] = []
        self.arena = Arena()
        self.hosts: list[nn.Module] = []  # of the last assignment; below the slots of each
        self.host_slots: list[dict[str, SeedSlot]] = []

    def load(self, hosts: Sequence[nn.Module]) -> FlatWeights:
        """Assign N hosts with their seeds, to run them only. Returns their weights: those in the arena, or copies."""
        self._assign(hosts)
        return self.arena if self.arena.holds(self.assignments) else FlatWeights(self.assignments)

    def move_into_arena(
        self, hosts: Sequence[nn.Module], optimizers: Sequence[Optimizer], state_names: Sequence[str]
    ) -> Arena:
        """Assign N hosts with their seeds, to train them. Returns the arena, where they live from now on."""
        self._assign(hosts)
        self.arena.assign(self.assignments, optimizers, state_names)
        return self.arena

    def _assign(self, hosts: Sequence[nn.Module]) -> None:
        """Note which host, and which seed of which host, has which row of the batched modules in the coming epoch.

        No weights are moved: `FlatWeights` and `Arena` do that.
        """
        self.release()
        # `slots_of` walks the network; skip it for the hosts of the last call.
        if len(self.hosts) != len(hosts) or any(a is not b for a, b in zip(hosts, self.hosts, strict=True)):
            self.hosts, self.host_slots = list(hosts), [slots_of(host) for host in hosts]
        slots = [[*slots.values()] for slots in self.host_slots]
        assert all(depths(own) == self.depths for own in slots), "batched hosts have one depth"
        blocks = [block for own in slots for slot in own if isinstance(slot, DepthSlot) for block in slot.grown]
        self.assignments = [Assignment(self.batched_host, self.hosts, range(len(hosts)), blocks)]
        self.seed_slots: list[list[tuple[int, str]]] = []  # host and slot of each seed, by batched seeds
        for name, slot in self.slots.items():
            slot.assign([slots[name] for slots in self.host_slots])
            for seeds in slot.active_seeds:
                seed_hosts = list(seeds.row_of_host)
                seeds_of_hosts = [self.host_slots[host][name].seed for host in seed_hosts]
                self.assignments.append(Assignment(seeds.batched, seeds_of_hosts, seed_hosts))
                self.seed_slots.append([(host, name) for host in seed_hosts])

    def release(self) -> None:
        """Drop the bound weights: copies free their memory, and the arena keeps those of its hosts."""
        for assignment in self.assignments:
            assignment.batched.release()
        for slot in self.slots.values():
            slot.release()
        self.index.select_all(0)
        self.assignments = []

    def train(self, inputs: Tensor) -> Tensor:  # [N·B, …], host by host -> [N·B, …]
        """Run the N hosts in training mode, each on its own minibatch."""
        self._set_training(True)
        self.index.select_all(len(self.hosts))
        return self._run(inputs, len(self.hosts))

    def evaluate(
        self, inputs: Tensor, variants: Sequence[Sequence[SeedVariant]], data_variants: Sequence[int] | None = None
    ) -> Tensor:  # [B, …] -> [G·B, …]
        """Run the same inputs through every host with each of its combinations of seeds; see `Entries`.

        Args:
            inputs: Inputs shared by all hosts; or [M, B, …], M variants of them.
            variants: Combinations of seeds, [N][V].
            data_variants: Variant of the inputs for each host, [N]; None if there is only one.
        """
        self._set_training(False)
        off_trunk = {
            name: [host for seeds in slot.active_seeds for host in seeds.blended_hosts]
            for name, slot in self.slots.items()
            if not self.host_slots[0][name].on_single_path
        }
        self.entries.begin_pass(variants, off_trunk)
        hosts, count = self.entries.hosts, self.entries.count
        if hosts == list(range(len(self.hosts))):
            self.index.select_all(len(self.hosts))
        else:
            self.index.select_rows(upload(hosts, inputs.device))
        if data_variants is None:
            return self._run(inputs.repeat(count, *[1] * (inputs.ndim - 1)), count)
        entry_variants = upload([data_variants[host] for host in hosts], inputs.device)
        return self._run(inputs.index_select(0, entry_variants).flatten(0, 1), count)

    def _set_training(self, training: bool) -> None:
        """Set the training mode of the modules where it changes, because a call visits many modules."""
        for assignment in self.assignments:
            if assignment.batched.module.training != training:
                assignment.batched.module.train(training)

    def _run(self, inputs: Tensor, count: int) -> Tensor:
        outputs = self.network(batch_inputs(inputs, count))
        return unbatch_outputs(outputs, self.index.count, len(inputs) // count)
