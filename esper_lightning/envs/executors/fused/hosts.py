"""N hosts as one network: the host's own code on batched features, with the weights of all hosts and seeds."""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.envs.executors.fused.flat import Arena, Assignment, BatchedModule, FlatWeights
from esper_lightning.envs.executors.fused.layers import (
    RowIndex,
    batch_inputs,
    batch_layers,
    broadcast_per_entry,
    columns_to_rows,
    flatten_entries,
    merge,
    rows_to_columns,
    select_entries,
    split,
    unbatch_outputs,
    unflatten_entries,
)
from esper_lightning.envs.measurements import upload
from esper_lightning.growth.attach import attach_at, attached_places, detach_slots
from esper_lightning.growth.blend import blend, proximal_gradient
from esper_lightning.growth.counterfactual import SeedVariant
from esper_lightning.growth.depth import DepthSlot, depths
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import SeedSlot

Flags = Tensor | bool
"""One bool per entry, [S]; a Python bool where all are equal."""


def _compact_flags(values: Sequence[bool], device: torch.device) -> Flags:
    return values[0] if len(set(values)) == 1 else upload(values, device)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


class _HideIsolatedSeeds(torch.autograd.Function):
    """Replaces `mixed`, the blend of host and seed, by the host's feature x in entries whose seed is isolated.

    Such a seed learns although it does not show: its entries of `mixed` get the gradient of the result, with isolation
    `proximal` as `proximal_gradient`. So does x; in all other entries x gets none from here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mixed: Tensor, isolated: Flags, count: int, is_proximal: bool) -> Tensor:
        ctx.isolated, ctx.count = isolated, count
        ctx.save_for_backward(*((x, mixed) if is_proximal else ()))
        # A copy, not a view: the host may modify it in place.
        return x.clone() if isinstance(isolated, bool) else torch.where(broadcast_per_entry(isolated, x), x, mixed)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (grad,) = grad_outputs
        seed_grad = grad
        features = ctx.saved_tensors  # read once: with recomputed activations a second reading is an error
        if features:  # x and mixed, with isolation `proximal`
            (grads, axis), (x, _), (mixed, _) = (unflatten_entries(part, ctx.count) for part in (grad, *features))
            dims = [dim for dim in range(grads.ndim) if dim != axis]  # norms per entry
            seed_grad = flatten_entries(proximal_gradient(grads, x, mixed, dims).to(grad.dtype), axis)
        if isinstance(ctx.isolated, bool):  # all seeds are isolated
            return grad, seed_grad, None, None, None
        isolated = broadcast_per_entry(ctx.isolated, grad)
        return torch.where(isolated, grad, 0.0), torch.where(isolated, seed_grad, grad), None, None, None


class BatchedSeeds:
    """Seeds of one kind in one slot of several hosts, computed by one module: the batched copy of a seed.

    Attributes:
        row_of_host: Row of the batched weights for each host index that has such a seed.
        blended_hosts: Indices of the hosts whose seed is blended; no other has an effect in evaluation.
        detached: Which seeds let no gradient through to their input.
    """

    def __init__(self, seed: nn.Module) -> None:
        self.index = RowIndex()
        with torch.inference_mode(False):  # tensors of the seed are used in training too
            self.batched = BatchedModule(batch_layers(deepcopy(seed), self.index).eval())

    def assign(self, slots: Mapping[int, SeedSlot]) -> None:
        """Assign the hosts that have such a seed in the coming epoch, given as slot by host index."""
        self.row_of_host = {host: i for i, host in enumerate(slots)}
        self.blended_hosts = [host for host, slot in slots.items() if slot.blended]
        is_detached = [slot.isolated or (slot.live and slot.detach_input) for slot in slots.values()]
        self.detached = _compact_flags(is_detached, next(iter(slots.values())).alpha.device)

    def train(self, x: Tensor) -> Tensor:
        """Apply the seeds in training mode to the features of their hosts, one entry each."""
        self.index.select_all(len(self.row_of_host))
        if isinstance(self.detached, Tensor):
            # No autograd.Function: a backward pass without Python runs in parallel to other forward passes.
            x = torch.where(broadcast_per_entry(self.detached, x), x.detach(), x)
        elif self.detached:
            x = x.detach()
        return self.batched.module(x)

    def evaluate(self, x: Tensor, hosts: Sequence[int]) -> Tensor:
        """Apply the seed of host `hosts[i]` to entry i of `x`; hosts may be listed repeatedly."""
        self.index.select_rows(upload([self.row_of_host[host] for host in hosts], x.device))
        return self.batched.module(x)


class Entry(NamedTuple):
    """Part of a batched feature in an evaluation pass: one host with one or more of its combinations of seeds."""

    host: int
    combinations: list[int]  # indices of them; so far their outputs are the same


class Entries:
    """Entries of an evaluation pass of N hosts: copies of a minibatch, each of one host, one behind the other.

    One entry serves all combinations of seeds of its host that have had the same outputs so far. As in
    `forward_variants`, it is divided at the first slot where its combinations differ, but each host has its own
    combinations, `variants` [N][V].
    """

    def __init__(self) -> None:
        self.variants: Sequence[Sequence[SeedVariant]] = []
        self.entries: list[Entry] = []

    def begin_pass(self, variants: Sequence[Sequence[SeedVariant]], off_trunk: Mapping[str, Collection[int]]) -> None:
        """Begin a pass with an entry for each host.

        Hosts with a seed in a slot off the trunk, which a shortcut bypasses, are divided at the input.
        """
        self.variants = variants
        self.entries = [Entry(host, list(range(len(combinations)))) for host, combinations in enumerate(variants)]
        for slot, seeded in off_trunk.items():
            self.regroup(slot, [seeded])

    @property
    def hosts(self) -> list[int]:
        """Host index of each entry."""
        return [entry.host for entry in self.entries]

    def regroup(self, slot: str, groups: Sequence[Collection[int]], divide: bool = True) -> tuple[list[int], list[int]]:
        """Divide the entries whose combinations differ in `slot`, and order the entries by group.

        Args:
            slot: Name of the slot.
            groups: Indices of the hosts with a seed there, by kind of seed; a host is in at most one group.
            divide: False to leave the entries as they are. For slots off the trunk, whose entries were divided at the
                input: the shortcut around the slot needs them in the present order.

        Returns for each new entry the index of the entry it came from, and the number of entries of each group. An
        entry belongs to its host's group if the seed takes part, and otherwise to one more group at the end.
        """
        group_of = {host: group for group, hosts in enumerate(groups) for host in hosts}
        sources: list[list[int]] = [[] for _ in range(len(groups) + 1)]  # by group
        entries: list[list[Entry]] = [[] for _ in sources]
        for source, (host, combinations) in enumerate(self.entries):
            with_seed = [v for v in combinations if host in group_of and slot in self.variants[host][v]]
            without_seed = [v for v in combinations if v not in with_seed]
            for group, part in ((group_of.get(host, -1), with_seed), (-1, without_seed)):
                if part:
                    sources[group].append(source)
                    entries[group].append(Entry(host, part))
        if divide:
            self.entries = list(chain.from_iterable(entries))
        return list(chain.from_iterable(sources)), [len(group) for group in sources]

    def entry_of_variant(self) -> list[list[int]]:  # [N][V]
        """Return for each combination of seeds of each host the index of the entry in which its outputs are."""
        entry_of = [[0] * len(combinations) for combinations in self.variants]
        for index, entry in enumerate(self.entries):
            for combination in entry.combinations:
                entry_of[entry.host][combination] = index
        return entry_of


class BatchedSlot:
    """One slot of many hosts, each with its own seed or none. Replaces the forward pass of a `SeedSlot`."""

    def __init__(self, index: RowIndex, entries: Entries) -> None:
        self.index, self.entries = index, entries
        self.seed_modules = nn.ModuleList()  # so that a search for buffers finds those of seeds
        self.seeds_by_blueprint: dict[str, BatchedSeeds] = {}  # of every blueprint so far
        self.active_seeds: list[BatchedSeeds] = []  # in the coming epoch

    def assign(self, slots: Sequence[SeedSlot]) -> None:
        """Assign the seeds of all hosts, given by their slots, to batched seeds. Raises ValueError for a folded seed.

        Germination of a known kind changes the assignment only, and not the modules.
        """
        slots_by_blueprint: dict[str, dict[int, SeedSlot]] = {}
        for host, slot in enumerate(slots):
            if slot.folded is not None:
                raise ValueError(f"slot {slot.name!r}: executor fused cannot run a folded seed; use env.executor loop")
            if slot.blueprint is not None and slot.occupied:
                slots_by_blueprint.setdefault(slot.blueprint, {})[host] = slot
        self.active_seeds = []
        for blueprint, seeded in slots_by_blueprint.items():
            if blueprint not in self.seeds_by_blueprint:
                self.seeds_by_blueprint[blueprint] = seeds = BatchedSeeds(next(iter(seeded.values())).seed)
                self.seed_modules.append(seeds.batched.module)
            self.seeds_by_blueprint[blueprint].assign(seeded)
            self.active_seeds.append(self.seeds_by_blueprint[blueprint])
        device, dtype = slots[0].alpha.device, slots[0].alpha.dtype
        self.isolated = _compact_flags([slot.isolated for slot in slots], device)
        self.is_proximal = slots[0].isolation == "proximal"  # all hosts of a pool share their lifecycle
        # In training, hosts are ordered by kind of seed, then those without one: None if all are of one kind.
        parts = [*map(list, slots_by_blueprint.values()), [i for i, slot in enumerate(slots) if not slot.occupied]]
        order = list(chain.from_iterable(parts))
        self.sizes = [len(part) for part in parts if part]
        self.orders = (upload(order, device), upload(_inverse(order), device)) if len(self.sizes) > 1 else None
        # Weight of the seed's output by host index: an isolated seed learns for full alpha.
        self.output_weights = {
            host: 1.0 if slot.isolated else slot.alpha_now for host, slot in enumerate(slots) if slot.occupied
        }
        # None if all weights are 1: entries without a seed pass through unchanged anyway.
        weights = [self.output_weights.get(host, 0.0) for host in range(len(slots))]
        self.blend_weights = None if set(self.output_weights.values()) <= {1.0} else upload(weights, device, dtype)

    def __call__(self, slot: SeedSlot, x: Tensor) -> Tensor:
        """Return a batched feature with all seeds applied; `slot` is the slot in the batched network."""
        if not self.active_seeds:
            return x
        side_by_side = slot.layout == "vector" and x.shape[1] != slot.width  # [B, S·C], flattened from an image
        x = columns_to_rows(x, self.index.count) if side_by_side else x
        x = self._train(x) if slot.training else self._evaluate(slot, x)
        return rows_to_columns(x, self.index.count) if side_by_side else x

    def _train(self, x: Tensor) -> Tensor:
        """Apply every host's seed in training mode, according to its stage and alpha."""
        if self.orders is None:
            output = self.active_seeds[0].train(x)
        else:
            order, inverse = self.orders
            parts = split(x, self.sizes, order)
            for i, seeds in enumerate(self.active_seeds):
                parts[i] = seeds.train(parts[i])
            output = merge(parts, self.sizes, inverse)
        mixed = self._blend(x, output, self.blend_weights)
        if self.isolated is False:
            return mixed
        return _HideIsolatedSeeds.apply(x, mixed, self.isolated, self.index.count, self.is_proximal)

    def _blend(self, x: Tensor, output: Tensor, weights: Tensor | None) -> Tensor:
        return output.to(x.dtype) if weights is None else blend(x, output, broadcast_per_entry(weights, x))

    def _evaluate(self, slot: SeedSlot, x: Tensor) -> Tensor:
        """Apply each host's seed to the entries whose combination contains it.

        An entry that stands for combinations with and without this seed is divided in two; off the trunk they were
        divided at the input, and the order is restored.
        """
        hosts = self.entries.hosts
        groups = [seeds.blended_hosts for seeds in self.active_seeds]
        sources, sizes = self.entries.regroup(slot.name, groups, divide=slot.on_single_path)
        num_seeded = sum(sizes[:-1])
        if not num_seeded:
            return x
        x = select_entries(x, len(hosts), upload(sources, x.device))
        hosts = [hosts[source] for source in sources]  # ordered by kind of seed
        present = [(seeds, size) for seeds, size in zip([*self.active_seeds, None], sizes, strict=True) if size]
        sizes, remaining_hosts = [size for _, size in present], iter(hosts)
        parts = split(x, sizes)
        for i, (seeds, size) in enumerate(present):
            if seeds is not None:
                parts[i] = seeds.evaluate(parts[i], list(islice(remaining_hosts, size)))
        weights = None
        if self.blend_weights is not None:
            seeded_weights = [self.output_weights[host] for host in hosts[:num_seeded]]
            weights = upload(seeded_weights + [0.0] * (len(hosts) - num_seeded), x.device, self.blend_weights.dtype)
        output = self._blend(x, merge(parts, sizes), weights)
        if slot.on_single_path:
            self.index.select_rows(upload(hosts, x.device))
            return output
        return select_entries(output, len(sources), upload(_inverse(sources), x.device))


class BatchedHosts:
    """Many hosts of one kind as one network, given one of them. Raises ValueError if a layer cannot be batched."""

    def __init__(self, host: nn.Module) -> None:
        self.index, self.entries, self.arena = RowIndex(), Entries(), Arena()
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
        self.hosts: list[nn.Module] = []  # of the last assignment; below the slots of each
        self.host_slots: list[dict[str, SeedSlot]] = []

    def load(self, hosts: Sequence[nn.Module]) -> FlatWeights:
        """Assign N hosts with their seeds, to run them only. Returns their weights: those in the arena, or copies."""
        self.assign(hosts)
        return self.arena if self.arena.holds(self.assignments) else FlatWeights(self.assignments)

    def assign(self, hosts: Sequence[nn.Module]) -> None:
        """Note which of N hosts, and which of their seeds, has which row of the batched modules in the coming epoch.

        No weights are moved: `FlatWeights` and `Arena` do that.
        """
        self.release()
        if self.hosts != list(hosts):  # `slots_of` walks the network; skip it for the hosts of the last call
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
        self.assignments = []

    def train(self, inputs: Tensor) -> Tensor:  # [N·B, …], host by host -> [N·B, …]
        """Run the N hosts in training mode, each on its own minibatch."""
        self.index.select_all(len(self.hosts))
        return self._run(inputs, training=True)

    def evaluate(
        self, inputs: Tensor, variants: Sequence[Sequence[SeedVariant]], data_variants: Sequence[int] | None = None
    ) -> Tensor:  # [B, …] -> [G·B, …]
        """Run the same inputs through every host with each of its combinations of seeds; see `Entries`.

        Args:
            inputs: Inputs shared by all hosts; or [M, B, …], M variants of them.
            variants: Combinations of seeds, [N][V].
            data_variants: Variant of the inputs for each host, [N]; None if there is only one.
        """
        off_trunk = {
            name: [host for seeds in slot.active_seeds for host in seeds.blended_hosts]
            for name, slot in self.slots.items()
            if not self.host_slots[0][name].on_single_path
        }
        self.entries.begin_pass(variants, off_trunk)
        hosts = self.entries.hosts
        if hosts == list(range(len(self.hosts))):
            self.index.select_all(len(hosts))
        else:
            self.index.select_rows(upload(hosts, inputs.device))
        if data_variants is None:
            inputs = inputs.repeat(len(hosts), *[1] * (inputs.ndim - 1))
        else:
            entry_variants = upload([data_variants[host] for host in hosts], inputs.device)
            inputs = inputs.index_select(0, entry_variants).flatten(0, 1)
        return self._run(inputs, training=False)

    def _run(self, inputs: Tensor, training: bool) -> Tensor:
        """Return outputs of the network, one entry behind the other, for inputs [hosts · B, …], host behind host."""
        for assignment in self.assignments:
            if assignment.batched.module.training != training:  # `train` visits all modules, which takes time
                assignment.batched.module.train(training)
        count = self.index.count
        outputs = self.network(batch_inputs(inputs, count))
        # In an evaluation slots divide entries, so there may be more of them now.
        return unbatch_outputs(outputs, self.index.count, len(inputs) // count)
