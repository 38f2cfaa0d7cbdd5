"""Stacked seeds of one kind in one slot of many hosts, and the stacked slot that distributes features to them."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import islice

import torch
from torch import Tensor, nn

from esper_lightning.envs.execution.fused.layers import stacked
from esper_lightning.envs.execution.fused.members import (
    Deal,
    Members,
    columns_to_rows,
    divide,
    rows_to_columns,
    select,
    spread,
    unite,
)
from esper_lightning.envs.execution.fused.views import Views
from esper_lightning.envs.transfer import upload
from esper_lightning.growth.blend import Style, add, mix, straight_through
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import STRAIGHT_THROUGH

Kind = tuple[str, Style]
"""Blueprint and style of seeds that one stacked module computes."""

Flags = Tensor | bool
"""One bool per stack entry, [V]; a Python bool where all are equal."""


def _flags(values: Sequence[bool], device: torch.device) -> Flags:
    return values[0] if len(set(values)) == 1 else upload(values, device)


def _detach(x: Tensor, which: Flags) -> Tensor:
    """Return x with the flagged entries detached."""
    if isinstance(which, bool):
        return x.detach() if which else x
    # No autograd.Function: a backward pass without Python runs in parallel to other forward passes.
    return torch.where(spread(which, x), x.detach(), x)


class _Settle(torch.autograd.Function):
    """y = x where straight-through, else y = mixed.

    The gradient of y goes to `mixed` everywhere, and to x where straight-through.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, mixed: Tensor, learns: Tensor) -> Tensor:
        ctx.save_for_backward(learns)
        return torch.where(learns, x, mixed)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (learns,) = ctx.saved_tensors
        return torch.where(learns, grad, 0.0), grad, None


class Bank:
    """Seeds of one kind in one slot of several hosts, computed by one module.

    Args:
        seed: A seed of this kind, of which a copy is stacked.
        style: How the seeds' outputs are blended into the hosts' features.

    Attributes:
        row_of_host: Row of the stacked weights for each host index that has such a seed.
        blended_hosts: Indices of the hosts whose seed is blended.
    """

    def __init__(self, seed: nn.Module, style: Style) -> None:
        self.style = style
        self.members = Members()
        with torch.inference_mode(False):  # tensors of the seed are used in training too
            self.seed = stacked(deepcopy(seed), self.members).eval()

    def staff(self, slots: Mapping[int, SeedSlot]) -> None:
        """Assign the hosts that have such a seed in the coming epoch, given as slot by host index."""
        self.row = {host: i for i, host in enumerate(slots)}
        self.blended = [host for host, slot in slots.items() if slot.blended]
        alpha = next(iter(slots.values())).alpha
        learns = [_learns(slot) for slot in slots.values()]
        shut = [one or (slot.live and slot.isolate) for one, slot in zip(learns, slots.values(), strict=True)]
        self.learns, self.shut = _flags(learns, alpha.device), _flags(shut, alpha.device)
        if self.style != "add":
            self.alphas = upload([_alpha(slot) for slot in slots.values()], alpha.device, alpha.dtype)

    def release(self) -> None:
        """Drop the assignment: no host has such a seed."""
        self.members.all(0)
        self.learns = self.shut = False
        self.alphas = None

    def train(self, x: Tensor) -> Tensor:
        """Apply the seeds in training mode to the features of their hosts, one entry each; see `_apply_seeds`."""
        self.members.all(len(self.row))
        return self._grow(_detach(x, self.learns), _detach(x, self.shut))

    def evaluate(self, x: Tensor, hosts: Sequence[int]) -> Tensor:
        """Apply the seeds to the features of these hosts, which may occur several times; see `_apply_seeds`."""
        self.members.some(upload([self.row[host] for host in hosts], x.device))
        return self._grow(x, x)

    def _grow(self, x: Tensor, seen: Tensor) -> Tensor:
        """Return the seeds' outputs for `seed_inputs`; with styles other than "add", already blended into `x`."""
        if self.style == "add":
            return self.seed(seen)
        return mix(self.style, x, self.seed, seen, spread(self.members.pick(self.alphas), x))


def _learns(slot: SeedSlot) -> bool:
    """Return whether the slot's seed trains straight-through: the output stays x, the gradient reaches the seed."""
    return slot.stage in STRAIGHT_THROUGH


def _alpha(slot: SeedSlot) -> float:
    """Return the slot's alpha; 1 in straight-through stages, so that the seed learns for full alpha."""
    return 1.0 if _learns(slot) else slot.alpha_now


class StackedSlot:
    """One slot of many hosts, each with its own seed or none. Replaces the forward pass of a `SeedSlot`.

    Args:
        stack_index: The stack's selection of weight rows.
        entries: Combinations of seeds that the stack entries stand for in evaluation.

    Attributes:
        seed_modules: Stacked seeds of every kind, so that a search for buffers finds theirs.
    """

    def __init__(self, members: Members, views: Views) -> None:
        self.members = members
        self.views = views
        self.seeds = nn.ModuleList()
        self.kept: dict[Kind, Bank] = {}  # of every kind so far
        self.banks: list[Bank] = []  # in the coming epoch

    def fill(self, slots: Sequence[SeedSlot]) -> None:
        """Assign the seeds of all hosts to stacked seeds by kind. Raises ValueError for a folded seed.

        Germination of a known kind changes the assignment only, and not the modules.
        """
        found: dict[Kind, dict[int, SeedSlot]] = {}
        for host, slot in enumerate(slots):
            if slot.folded is not None:
                raise ValueError(f"slot {slot.name!r}: executor fused cannot run a folded seed; use env.executor loop")
            if slot.occupied:
                found.setdefault((slot.blueprint, slot.style), {})[host] = slot
        self.banks = [self._bank(kind, grown) for kind, grown in found.items()]
        if found:
            self._plan(slots)

    def _bank(self, kind: Kind, slots: Mapping[int, SeedSlot]) -> Bank:
        """Return the stacked seeds of one kind, assigned to these slots by host index."""
        if kind not in self.kept:
            self.kept[kind] = Bank(next(iter(slots.values())).seed, kind[1])
            self.seeds.append(self.kept[kind].seed)
        self.kept[kind].staff(slots)
        return self.kept[kind]

    def _plan(self, slots: Sequence[SeedSlot]) -> None:
        """Plan how features are partitioned by kind of seed, and the weight of each host's seed output."""
        device, dtype = slots[0].alpha.device, slots[0].alpha.dtype
        parts = [list(bank.row) for bank in self.banks]
        rest = [host for host, slot in enumerate(slots) if not slot.occupied]
        self.deal = Deal(parts + ([rest] if rest else []), device) if len(parts) > 1 or rest else None
        self.learns = _flags([_learns(slot) for slot in slots], device)
        # By host index; 1 for styles other than "add", whose outputs are blended already.
        self.shares = {
            host: _alpha(slots[host]) if bank.style == "add" else 1.0 for bank in self.banks for host in bank.row
        }
        # None if all weights are 1: entries without a seed pass through unchanged anyway.
        every = [self.shares.get(host, 0.0) for host in range(len(slots))]
        self.blend = None if set(self.shares.values()) == {1.0} else upload(every, device, dtype)

    def release(self) -> None:
        """Drop all assignments: no host has a seed in this slot."""
        for bank in self.banks:
            bank.release()
        self.banks, self.deal, self.learns, self.blend = [], None, False, None

    @property
    def blended(self) -> list[int]:
        """Indices of the hosts whose seed is blended."""
        return [host for bank in self.banks for host in bank.blended]

    def __call__(self, slot: SeedSlot, x: Tensor) -> Tensor:
        """Return a stacked feature with all seeds applied; `slot` is the slot in the stack's network."""
        if not self.banks:
            return x
        beside = slot.layout == "vector" and x.shape[1] != slot.width  # [B, V·C], flattened from an image
        x = columns_to_rows(x, self.members.count) if beside else x
        x = self._train(x) if slot.training else self._evaluate(slot, x)
        return rows_to_columns(x, self.members.count) if beside else x

    def _train(self, x: Tensor) -> Tensor:
        """Apply every host's seed in training mode, according to its stage and alpha."""
        parts = [x] if self.deal is None else self.deal.split(x)
        grown = [bank.train(part) for bank, part in zip(self.banks, parts, strict=False)]
        whole = grown[0] if self.deal is None else self.deal.join([*grown, *parts[len(grown) :]])
        mixed = whole.to(x.dtype) if self.blend is None else add(x, whole, spread(self.blend, x))
        if isinstance(self.learns, bool):
            return straight_through(x, mixed) if self.learns else mixed
        return _Settle.apply(x, mixed, spread(self.learns, x))

    def _evaluate(self, slot: SeedSlot, x: Tensor) -> Tensor:
        """Apply seeds to the entries that use them; an entry that stands for both cases becomes two."""
        present = self.views.hosts
        sort = self.views.split if slot.trunk else self.views.sort
        sources, sizes = sort(slot.name, [bank.blended for bank in self.banks])
        if not any(sizes[:-1]):
            return x
        hosts = [present[source] for source in sources]
        x = select(x, len(present), upload(sources, x.device))
        grown = self._grow(x, hosts, sizes)
        if slot.trunk:
            self.members.some(upload(hosts, x.device))
            return grown
        back = sorted(range(len(sources)), key=sources.__getitem__)
        return select(grown, len(sources), upload(back, x.device))

    def _grow(self, x: Tensor, hosts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Apply seeds to entries ordered by kind of seed.

        Args:
            hosts: Host index of each entry.
            sizes: Number of entries for each of the active seeds, then of entries without a seed.
        """
        parts = [(bank, size) for bank, size in zip([*self.banks, None], sizes, strict=True) if size]
        taken = [size for _, size in parts]
        each = iter(hosts)
        grown = [
            piece if bank is None else bank.evaluate(piece, list(islice(each, size)))
            for (bank, size), piece in zip(parts, divide(x, taken), strict=True)
        ]
        whole = unite(grown, taken)
        if self.blend is None:
            return whole.to(x.dtype)
        shares = [self.shares[host] for host in hosts[: len(hosts) - sizes[-1]]] + [0.0] * sizes[-1]
        return add(x, whole, spread(upload(shares, x.device, self.blend.dtype), x))
