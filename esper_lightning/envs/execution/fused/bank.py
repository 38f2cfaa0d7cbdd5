"""Seeds of one kind in one slot of many hosts, and the slot that deals hosts' features out to its banks."""

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
"""Blueprint and style: what seeds share that one program computes."""

Flags = Tensor | bool
"""One for each entry of a stack, [V]; a bool where all are equal."""


def _flags(values: Sequence[bool], device: torch.device) -> Flags:
    return values[0] if len(set(values)) == 1 else upload(values, device)


def _detach(x: Tensor, which: Flags) -> Tensor:
    """x; entries that are flagged get no gradient."""
    if isinstance(which, bool):
        return x.detach() if which else x
    # No autograd.Function: a backward pass that needs no Python runs beside other hosts' forward pass.
    return torch.where(spread(which, x), x.detach(), x)


class _Settle(torch.autograd.Function):
    """Where `learns`, x goes on bit for bit, and the gradient goes to x and to what was mixed alike; elsewhere what was
    mixed goes on."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, mixed: Tensor, learns: Tensor) -> Tensor:
        ctx.save_for_backward(learns)
        return torch.where(learns, x, mixed)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (learns,) = ctx.saved_tensors
        return torch.where(learns, grad, 0.0), grad, None


class Bank:
    """Seeds of one kind, in one slot of as many hosts.

    Args:
        seed: A seed of this kind; its code serves all of them.
        style: How the seeds' outputs meet their hosts' features.

    Attributes:
        row: For each host that has such a seed, the row of its weights.
        blended: Hosts whose seed is part of them.
    """

    def __init__(self, seed: nn.Module, style: Style) -> None:
        self.style = style
        self.members = Members()
        with torch.inference_mode(False):  # what a seed keeps beside weights serves in training too
            self.seed = stacked(deepcopy(seed), self.members).eval()

    def staff(self, slots: Mapping[int, SeedSlot]) -> None:
        """These hosts have such seeds in the coming epoch, in these slots."""
        self.row = {host: i for i, host in enumerate(slots)}
        self.blended = [host for host, slot in slots.items() if slot.blended]
        alpha = next(iter(slots.values())).alpha
        learns = [_learns(slot) for slot in slots.values()]
        shut = [one or (slot.live and slot.isolate) for one, slot in zip(learns, slots.values(), strict=True)]
        self.learns, self.shut = _flags(learns, alpha.device), _flags(shut, alpha.device)
        if self.style != "add":
            self.alphas = upload([_alpha(slot) for slot in slots.values()], alpha.device, alpha.dtype)

    def release(self) -> None:
        """Nobody has such seeds."""
        self.members.all(0)
        self.learns = self.shut = False
        self.alphas = None

    def train(self, x: Tensor) -> Tensor:
        """What the seeds make of the features of all their hosts, see `_grow`."""
        self.members.all(len(self.row))
        return self._grow(_detach(x, self.learns), _detach(x, self.shut))

    def evaluate(self, x: Tensor, hosts: Sequence[int]) -> Tensor:
        """What they make of features of these hosts, any of them several times; see `_grow`."""
        self.members.some(upload([self.row[host] for host in hosts], x.device))
        return self._grow(x, x)

    def _grow(self, x: Tensor, seen: Tensor) -> Tensor:
        """The seeds' answers to `seen`; under the styles beside "add" blended into `x` already."""
        if self.style == "add":
            return self.seed(seen)
        return mix(self.style, x, self.seed, seen, spread(self.members.pick(self.alphas), x))


def _learns(slot: SeedSlot) -> bool:
    """Straight-through."""
    return slot.stage in STRAIGHT_THROUGH


def _alpha(slot: SeedSlot) -> float:
    """While a seed learns straight-through it learns to be useful at full alpha."""
    return 1.0 if _learns(slot) else slot.alpha_now


class StackedSlot:
    """The slot of many hosts: each with a seed of its own, or none. It stands in for the forward pass of a SeedSlot.

    Args:
        members: The hosts in the stack.
        views: Which combinations of seeds the entries stand for, in evaluation.

    Attributes:
        seeds: Of all banks: what the slot holds, for whoever looks for buffers.
    """

    def __init__(self, members: Members, views: Views) -> None:
        self.members = members
        self.views = views
        self.seeds = nn.ModuleList()
        self.kept: dict[Kind, Bank] = {}  # every kind that was ever met
        self.banks: list[Bank] = []  # those of the coming epoch

    def fill(self, slots: Sequence[SeedSlot]) -> None:
        """Sorts the seeds of all hosts into banks. Germination changes who is where, not the program."""
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
        """With the seeds of one kind."""
        if kind not in self.kept:
            self.kept[kind] = Bank(next(iter(slots.values())).seed, kind[1])
            self.seeds.append(self.kept[kind].seed)
        self.kept[kind].staff(slots)
        return self.kept[kind]

    def _plan(self, slots: Sequence[SeedSlot]) -> None:
        """How features go to the banks and back, and how much of what the banks give goes on."""
        device, dtype = slots[0].alpha.device, slots[0].alpha.dtype
        parts = [list(bank.row) for bank in self.banks]
        rest = [host for host, slot in enumerate(slots) if not slot.occupied]
        self.deal = Deal(parts + ([rest] if rest else []), device) if len(parts) > 1 or rest else None
        self.learns = _flags([_learns(slot) for slot in slots], device)
        # Of each host's seed; beside "add" all of it goes on, for it is blended already.
        self.shares = {
            host: _alpha(slots[host]) if bank.style == "add" else 1.0 for bank in self.banks for host in bank.row
        }
        # None where all of all goes on: what has no seed comes back as it was.
        every = [self.shares.get(host, 0.0) for host in range(len(slots))]
        self.blend = None if set(self.shares.values()) == {1.0} else upload(every, device, dtype)

    def release(self) -> None:
        """Nothing grows here."""
        for bank in self.banks:
            bank.release()
        self.banks, self.deal, self.learns, self.blend = [], None, False, None

    @property
    def blended(self) -> list[int]:
        """Hosts whose seed is part of them."""
        return [host for bank in self.banks for host in bank.blended]

    def __call__(self, slot: SeedSlot, x: Tensor) -> Tensor:
        """A stacked feature with all seeds, as it passes through `slot` of the stack's network."""
        if not self.banks:
            return x
        beside = slot.layout == "vector" and x.shape[1] != slot.width  # an image has left them side by side: [B, V·C]
        x = columns_to_rows(x, self.members.count) if beside else x
        x = self._train(x) if slot.training else self._evaluate(slot, x)
        return rows_to_columns(x, self.members.count) if beside else x

    def _train(self, x: Tensor) -> Tensor:
        """Every host's feature with its seed, as the seed's stage and alpha say."""
        parts = [x] if self.deal is None else self.deal.split(x)
        grown = [bank.train(part) for bank, part in zip(self.banks, parts, strict=False)]
        whole = grown[0] if self.deal is None else self.deal.join([*grown, *parts[len(grown) :]])
        mixed = whole.to(x.dtype) if self.blend is None else add(x, whole, spread(self.blend, x))
        if isinstance(self.learns, bool):
            return straight_through(x, mixed) if self.learns else mixed
        return _Settle.apply(x, mixed, spread(self.learns, x))

    def _evaluate(self, slot: SeedSlot, x: Tensor) -> Tensor:
        """Every entry with its seed, or without: entries that stood for both become two."""
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
        """Entries of these hosts: so many for each bank, one bank after the other; the last stay as they are."""
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
