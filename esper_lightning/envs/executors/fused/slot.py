"""One slot of many hosts with the batched seeds of each kind, and the entries of a pass with combinations of seeds."""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from esper_lightning.envs.executors.fused.flat import BatchedModule
from esper_lightning.envs.executors.fused.layers import (
    RowIndex,
    batch_layers,
    broadcast_per_entry,
    columns_to_rows,
    flatten_entries,
    merge,
    rows_to_columns,
    select_entries,
    split,
    unflatten_entries,
)
from esper_lightning.envs.measurements import upload
from esper_lightning.growth.blend import blend, proximal_gradient
from esper_lightning.growth.counterfactual import SeedVariant
from esper_lightning.growth.slot import SeedSlot

Flags = Tensor | bool
"""One bool per entry, [S]; a Python bool where all are equal."""


def _compact_flags(values: Sequence[bool], device: torch.device) -> Flags:
    return values[0] if len(set(values)) == 1 else upload(values, device)


def _detach(x: Tensor, flags: Flags) -> Tensor:
    """Return x with the flagged entries detached."""
    if isinstance(flags, bool):
        return x.detach() if flags else x
    # No autograd.Function: a backward pass without Python runs in parallel to other forward passes.
    return torch.where(broadcast_per_entry(flags, x), x.detach(), x)


class _HideIsolatedSeeds(torch.autograd.Function):
    """y = x where a seed is isolated, else y = mixed.

    The gradient of y goes to x where a seed is isolated, and to `mixed` everywhere: with isolation `proximal` it goes
    to an isolated seed as `proximal_gradient`, with norms per entry.
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
        to_seed = grad
        features = ctx.saved_tensors  # read once: with recomputed activations a second reading is an error
        if features:  # x and mixed, with isolation `proximal`
            host, seed = (unflatten_entries(feature, ctx.count)[0] for feature in features)
            grads, axis = unflatten_entries(grad, ctx.count)
            dims = [dim for dim in range(grads.ndim) if dim != axis]
            to_seed = flatten_entries(proximal_gradient(grads, host, seed, dims).to(grad.dtype), axis)
        if isinstance(ctx.isolated, bool):  # all seeds are isolated
            return grad, to_seed, None, None, None
        isolated = broadcast_per_entry(ctx.isolated, grad)
        return torch.where(isolated, grad, 0.0), torch.where(isolated, to_seed, grad), None, None, None


class BatchedSeeds:
    """Seeds of one kind in one slot of several hosts, computed by one module: the batched copy of a seed.

    Attributes:
        row_of_host: Row of the batched weights for each host index that has such a seed.
        blended_hosts: Indices of the hosts whose seed is blended; no other has an effect in evaluation.
    """

    def __init__(self, seed: nn.Module) -> None:
        self.index = RowIndex()
        with torch.inference_mode(False):  # tensors of the seed are used in training too
            self.batched = BatchedModule(batch_layers(deepcopy(seed), self.index).eval())
        self.release()

    def release(self) -> None:
        """Drop the assignment: no host has such a seed."""
        self.index.select_all(0)
        self.detached: Flags = False

    def assign(self, slots: Mapping[int, SeedSlot]) -> None:
        """Assign the hosts that have such a seed in the coming epoch, given as slot by host index."""
        self.row_of_host = {host: i for i, host in enumerate(slots)}
        self.blended_hosts = [host for host, slot in slots.items() if slot.blended]
        is_detached = [slot.isolated or (slot.live and slot.detach_input) for slot in slots.values()]
        self.detached = _compact_flags(is_detached, next(iter(slots.values())).alpha.device)

    def train(self, x: Tensor) -> Tensor:
        """Apply the seeds in training mode to the features of their hosts, one entry each."""
        self.index.select_all(len(self.row_of_host))
        return self.batched.module(_detach(x, self.detached))

    def evaluate(self, x: Tensor, hosts: Sequence[int]) -> Tensor:
        """Apply the seed of host `hosts[i]` to entry i of `x`; hosts may be listed repeatedly."""
        self.index.select_rows(upload([self.row_of_host[host] for host in hosts], x.device))
        return self.batched.module(x)


class Entries:
    """Entries of an evaluation pass: each stands for one host with one or more combinations of its seeds.

    As in `forward_variants`, an entry is divided at the first slot where its combinations differ, but each host has its
    own combinations.
    """

    def __init__(self) -> None:
        self.variants: Sequence[Sequence[SeedVariant]] = []
        self.items: list[tuple[int, list[int]]] = []  # host index, and indices of its combinations

    def begin_pass(self, variants: Sequence[Sequence[SeedVariant]], off_trunk: Mapping[str, Collection[int]]) -> None:
        """Begin a pass over N hosts with combinations of seeds [N][V].

        Hosts with a seed in a slot off the trunk, which a shortcut bypasses, are divided at the input.
        """
        self.variants = variants
        self.items = [(host, list(range(len(combinations)))) for host, combinations in enumerate(variants)]
        for slot, seeded in off_trunk.items():
            self.regroup(slot, [seeded])

    @property
    def count(self) -> int:
        return len(self.items)

    @property
    def hosts(self) -> list[int]:
        """Host index of each entry."""
        return [host for host, _ in self.items]

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
        parts: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(len(groups) + 1)]
        for source, (host, combinations) in enumerate(self.items):
            with_seed = [v for v in combinations if host in group_of and slot in self.variants[host][v]]
            without_seed = [v for v in combinations if v not in with_seed]
            if with_seed:
                parts[group_of[host]].append((source, host, with_seed))
            if without_seed:
                parts[-1].append((source, host, without_seed))
        entries = [entry for part in parts for entry in part]
        if divide:
            self.items = [(host, combinations) for _, host, combinations in entries]
        return [source for source, _, _ in entries], [len(part) for part in parts]

    def entry_of_variant(self) -> list[list[int]]:  # [N][V]
        """Return the index of the entry that holds each combination of each host."""
        entry_by_host: list[dict[int, int]] = [{} for _ in self.variants]
        for entry, (host, combinations) in enumerate(self.items):
            entry_by_host[host].update(dict.fromkeys(combinations, entry))
        return [[entries[v] for v in range(len(entries))] for entries in entry_by_host]


class BatchedSlot:
    """One slot of many hosts, each with its own seed or none. Replaces the forward pass of a `SeedSlot`."""

    def __init__(self, index: RowIndex, entries: Entries) -> None:
        self.index = index
        self.entries = entries
        self.seed_modules = nn.ModuleList()  # so that a search for buffers finds those of seeds
        self.seeds_by_blueprint: dict[str, BatchedSeeds] = {}  # of every blueprint so far
        self.active_seeds: list[BatchedSeeds] = []  # in the coming epoch
        self.orders: tuple[Tensor, Tensor] | None = None
        self.isolated: Flags = False
        self.blend_weights: Tensor | None = None

    def release(self) -> None:
        """Drop all assignments: no host has a seed in this slot."""
        for seeds in self.active_seeds:
            seeds.release()
        self.active_seeds, self.orders, self.isolated, self.blend_weights = [], None, False, None

    def assign(self, slots: Sequence[SeedSlot]) -> None:
        """Assign the seeds of all hosts to batched seeds by kind. Raises ValueError for a folded seed.

        Germination of a known kind changes the assignment only, and not the modules.
        """
        slots_by_blueprint: dict[str, dict[int, SeedSlot]] = {}
        for host, slot in enumerate(slots):
            if slot.folded is not None:
                raise ValueError(f"slot {slot.name!r}: executor fused cannot run a folded seed; use env.executor loop")
            if slot.occupied:
                assert slot.blueprint is not None, "the seed's"
                slots_by_blueprint.setdefault(slot.blueprint, {})[host] = slot
        for blueprint, seeded in slots_by_blueprint.items():
            if blueprint not in self.seeds_by_blueprint:
                self.seeds_by_blueprint[blueprint] = seeds = BatchedSeeds(next(iter(seeded.values())).seed)
                self.seed_modules.append(seeds.batched.module)
            self.seeds_by_blueprint[blueprint].assign(seeded)
            self.active_seeds.append(self.seeds_by_blueprint[blueprint])
        if slots_by_blueprint:
            self._plan_training(slots)

    def _plan_training(self, slots: Sequence[SeedSlot]) -> None:
        """Plan how features are distributed by kind of seed, and the weight of each host's seed output."""
        device, dtype = slots[0].alpha.device, slots[0].alpha.dtype
        parts = [list(seeds.row_of_host) for seeds in self.active_seeds]
        without_seed = [host for host, slot in enumerate(slots) if not slot.occupied]
        parts += [without_seed] if without_seed else []
        order = [host for part in parts for host in part]
        self.sizes = [len(part) for part in parts]
        # Order of the hosts by part, and the order in which they are hosts again. None: all are in one part.
        inverse = sorted(range(len(order)), key=order.__getitem__)
        self.orders = (upload(order, device), upload(inverse, device)) if len(parts) > 1 else None
        self.isolated = _compact_flags([slot.isolated for slot in slots], device)
        self.is_proximal = slots[0].isolation == "proximal"  # all hosts of a pool share their lifecycle
        # By host index. An isolated seed learns for full alpha.
        self.output_weights = {
            host: 1.0 if slot.isolated else slot.alpha_now for host, slot in enumerate(slots) if slot.occupied
        }
        # None if all weights are 1: entries without a seed pass through unchanged anyway.
        weights = [self.output_weights.get(host, 0.0) for host in range(len(slots))]
        self.blend_weights = None if set(self.output_weights.values()) == {1.0} else upload(weights, device, dtype)

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
            parts = split(x, self.sizes, self.orders[0])
            outputs = [seeds.train(part) for seeds, part in zip(self.active_seeds, parts, strict=False)]
            output = merge([*outputs, *parts[len(outputs) :]], self.sizes, self.orders[1])
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
        entry_hosts = self.entries.hosts
        groups = [seeds.blended_hosts for seeds in self.active_seeds]
        sources, sizes = self.entries.regroup(slot.name, groups, divide=slot.on_single_path)
        if not any(sizes[:-1]):
            return x
        host_of_entry = [entry_hosts[source] for source in sources]  # ordered by kind of seed
        x = select_entries(x, len(entry_hosts), upload(sources, x.device))
        parts = [(seeds, size) for seeds, size in zip([*self.active_seeds, None], sizes, strict=True) if size]
        part_sizes, remaining_hosts = [size for _, size in parts], iter(host_of_entry)
        outputs = [
            part if seeds is None else seeds.evaluate(part, list(islice(remaining_hosts, size)))
            for (seeds, size), part in zip(parts, split(x, part_sizes), strict=True)
        ]
        weights = None
        if self.blend_weights is not None:
            seeded = [self.output_weights[host] for host in host_of_entry[: len(sources) - sizes[-1]]]
            weights = upload(seeded + [0.0] * sizes[-1], x.device, self.blend_weights.dtype)
        output = self._blend(x, merge(outputs, part_sizes), weights)
        if slot.on_single_path:
            self.index.select_rows(upload(host_of_entry, x.device))
            return output
        inverse = sorted(range(len(sources)), key=sources.__getitem__)
        return select_entries(output, len(sources), upload(inverse, x.device))
