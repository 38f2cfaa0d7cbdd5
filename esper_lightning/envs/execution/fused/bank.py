"""Seeds of one kind in one slot of many hosts, and the slot that deals hosts' features out to its banks."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from esper_lightning.envs.execution.fused.layers import stacked
from esper_lightning.envs.execution.fused.members import Deal, Members, columns_to_rows, rows_to_columns, select, spread
from esper_lightning.envs.execution.fused.views import Views
from esper_lightning.envs.transfer import upload
from esper_lightning.growth.blend import Style, add, mix
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import STRAIGHT_THROUGH

Kind = tuple[str, Style]
"""Blueprint and style: what seeds share that one program computes."""


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


def _gradient_where(open: Tensor, x: Tensor) -> Tensor:
    """x; its gradient is that of the entries that are `open` [V]."""
    # No autograd.Function: a backward pass that needs no Python runs beside other hosts' forward pass.
    return torch.where(spread(open, x), x, x.detach())


class Bank:
    """Seeds of one kind, in one slot of as many hosts.

    Args:
        seed: A seed of this kind; its code serves all of them.
        style: How the seeds' outputs meet their hosts' features.

    Attributes:
        row: For each host that has such a seed, the row of its weights.
    """

    def __init__(self, seed: nn.Module, style: Style) -> None:
        self.style = style
        self.members = Members()
        self.seed = stacked(deepcopy(seed), self.members)
        self.row: dict[int, int] = {}

    def __call__(self, x: Tensor, trunk: Tensor | None, alpha: Tensor) -> Tensor:
        """What the members' seeds make of the features `x`; under the styles beside "add", mixed into `trunk` already.

        Args:
            x: A stacked feature of the present members.
            trunk: The same feature, as the hosts' own way on; read by the styles beside "add" alone.
            alpha: Of each, [V].
        """
        if self.style == "add":
            return self.seed(x)
        return mix(self.style, trunk, self.seed, x, spread(alpha, x))


class StackedSlot(nn.Module):
    """The slot of many hosts: each with a seed of its own, or none.

    Args:
        slot: Of one host.
        members: The hosts in the stack.
        views: Which combinations of seeds the entries stand for, in evaluation.
    """

    def __init__(self, slot: SeedSlot, members: Members, views: Views) -> None:
        super().__init__()
        self.name, self.layout, self.width = slot.name, slot.layout, slot.width
        self.members = members
        self.views = views
        self.kept: dict[Kind, Bank] = {}  # every kind that was ever met
        self.banks: dict[Kind, Bank] = {}  # those of the coming epoch

    def fill(self, slots: Sequence[SeedSlot]) -> None:
        """Sorts the seeds of all hosts into banks. Germination changes who is where, not the program."""
        found: dict[Kind, list[int]] = {}
        for host, slot in enumerate(slots):
            if slot.occupied:
                found.setdefault((slot.blueprint, slot.style), []).append(host)
        for kind, hosts in found.items():
            if kind not in self.kept:
                self.kept[kind] = Bank(slots[hosts[0]].seed, kind[1])
            self.kept[kind].row = {host: i for i, host in enumerate(hosts)}
        self.banks = {kind: self.kept[kind] for kind in found}
        self.blended = {host for host, slot in enumerate(slots) if slot.blended}
        if found:
            self._plan(slots)

    def _plan(self, slots: Sequence[SeedSlot]) -> None:
        """How features go to the banks and back, and how gradients do."""
        device, dtype = slots[0].alpha.device, slots[0].alpha.dtype
        parts = [list(bank.row) for bank in self.banks.values()]
        rest = [host for host, slot in enumerate(slots) if not slot.occupied]
        self.deal = Deal(parts + ([rest] if rest else []), device) if len(parts) > 1 or rest else None
        learns = [slot.stage in STRAIGHT_THROUGH for slot in slots]
        self.learns = upload(learns, device) if any(learns) else None
        shut = [one or (slot.blended and slot.live and slot.isolate) for one, slot in zip(learns, slots, strict=True)]
        self.open = ~upload(shut, device) if any(shut) else None
        # While a seed learns straight-through it learns to be useful at full alpha.
        alphas = [1.0 if one else slot.alpha_now for one, slot in zip(learns, slots, strict=True)]
        self.alphas = upload(alphas, device, dtype)  # [N]
        # How much of what the banks give goes on: of the styles beside "add", all, as it is mixed already.
        shares = [a if slot.style == "add" else 1.0 for a, slot in zip(alphas, slots, strict=True)]
        self.shares = upload(shares, device, dtype)
        self.part_alphas = [self.alphas[upload(part, device)] for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        if not self.banks:
            return x
        grow = self._train if self.training else self._evaluate
        if self.layout == "vector" and x.shape[1] != self.width:  # an image has left them side by side: [B, V·C]
            return rows_to_columns(grow(columns_to_rows(x, self.members.count)), self.members)
        return grow(x)

    def _train(self, x: Tensor) -> Tensor:
        """Every host's feature with its seed, as the seed's stage and alpha say."""
        trunk = x if self.learns is None else _gradient_where(~self.learns, x)
        seen = x if self.open is None else _gradient_where(self.open, x)
        banks = list(self.banks.values())
        for bank in banks:
            bank.members.all(len(bank.row))
        parts = [seen] if self.deal is None else self.deal.split(seen)
        trunks = parts
        if trunk is not seen and any(bank.style != "add" for bank in banks):
            trunks = [trunk] if self.deal is None else self.deal.split(trunk)
        rows = zip(banks, parts, trunks, self.part_alphas, strict=False)
        grown = [bank(part, own, alpha) for bank, part, own, alpha in rows]
        whole = grown[0] if self.deal is None else self.deal.join([*grown, *parts[len(banks) :]])
        mixed = add(trunk, whole, spread(self.shares, x))
        return mixed if self.learns is None else _Settle.apply(x, mixed, spread(self.learns, x))

    def _evaluate(self, x: Tensor) -> Tensor:
        """Every entry with its seed, or without: entries that stood for both become two."""
        before = self.views.count
        sources, expressed = self.views.split(self.name, self.blended)
        if not any(expressed):
            return x
        hosts, device = self.views.hosts, x.device
        self.members.some(upload(hosts, device))
        x = select(x, before, upload(sources, device))
        parts = [[i for i, on in enumerate(expressed) if on and hosts[i] in bank.row] for bank in self.banks.values()]
        busy = [(bank, part) for bank, part in zip(self.banks.values(), parts, strict=True) if part]
        rest = [i for i, on in enumerate(expressed) if not on]
        deal = Deal([part for _, part in busy] + ([rest] if rest else []), device)
        pieces = deal.split(x)
        grown = []
        for (bank, part), piece in zip(busy, pieces, strict=False):
            bank.members.some(upload([bank.row[hosts[i]] for i in part], device))
            grown.append(bank(piece, piece, self.alphas[upload([hosts[i] for i in part], device)]))
        whole = deal.join([*grown, *pieces[len(grown) :]])
        shares = self.shares[self.members.index] * upload(expressed, device)
        return add(x, whole, spread(shares, x))
