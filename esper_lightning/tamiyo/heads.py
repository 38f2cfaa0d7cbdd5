"""Action heads: networks that turn hidden features into logits, as one table per head.

K slots, B blueprints, W = width of the policy, H = W // 2. The heads of hosts point at rows (Vinyals et al. 2015,
https://arxiv.org/abs/1506.03134): neither slots nor blueprints determine the number of their weights.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import Action, Masks
from esper_lightning.envs.spaces.actions import ActionSpace
from esper_lightning.envs.vector_env import ChoiceAction, ChoiceMasks, ChoiceSpace
from esper_lightning.tamiyo.distribution import (
    HOST_PARENTS,
    ChoiceDistribution,
    HeadTables,
    HostDistribution,
    host_action,
    host_mask,
    host_table_shapes,
    masked_log_softmax,
    select_row,
)

SMALL_GAIN = 0.01
"""Gain of the layers that end in logits: at first all choices are about equally likely."""


class Hidden(NamedTuple):
    """Hidden features of environments. Only those of hosts have slots and blueprints."""

    core: Tensor  # [..., W] of the environment as a whole, with memory
    slots: Tensor | None = None  # [..., K, W]
    blueprints: Tensor | None = None  # [..., K, B, H] of each blueprint in each slot

    def first(self) -> "Hidden":
        """Return the features of the first step."""
        slots, blueprints = (None if part is None else part[0] for part in self[1:])
        return Hidden(self.core[0], slots, blueprints)


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """Return a linear layer with orthogonal weights and without initial bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class CoreTable(nn.Module):
    """Logits of choices from the core alone."""

    def __init__(self, width: int, choices: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(width, width // 2), nn.ReLU(), linear(width // 2, choices, SMALL_GAIN))

    def forward(self, core: Tensor) -> Tensor:  # [..., W] -> [..., 1, choices]
        return self.layers(core).unsqueeze(-2)


class SlotTable(nn.Module):
    """Logits of the slots for each op: the core's query for the op times the slot's key, plus the slot's own merit."""

    def __init__(self, width: int, ops: int) -> None:
        super().__init__()
        self.ops = ops
        self.query = linear(width, ops * (width // 2), 0.1)
        self.merit = linear(width // 2, ops, SMALL_GAIN)

    def forward(self, core: Tensor, slots: Tensor) -> Tensor:  # [..., W], [..., K, H] -> [..., ops, K]
        query = self.query(core).unflatten(-1, (self.ops, -1))  # [..., ops, H]
        return query @ slots.mT / slots.shape[-1] + self.merit(slots).mT


class BlueprintTable(nn.Module):
    """Logits of the blueprints for each slot: the slot's query times the blueprint's key, plus a network of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.query = linear(half, half, 0.1)
        self.of_blueprint, self.of_slot = linear(half, half), linear(half, half)
        self.merit = linear(half, 1, SMALL_GAIN)

    def forward(self, blueprints: Tensor, slots: Tensor) -> Tensor:  # [..., K, B, H], [..., K, H] -> [..., K, B]
        # The blueprints, of which there are most, are their own keys.
        match = (blueprints @ self.query(slots).unsqueeze(-1)).squeeze(-1) / math.sqrt(slots.shape[-1])
        both = F.relu_(self.of_blueprint(blueprints).add_(self.of_slot(slots).unsqueeze(-2)))
        return match + self.merit(both).squeeze(-1)


class RowTable(nn.Module):
    """Logits of `choices` for each slot."""

    def __init__(self, width: int, choices: int) -> None:
        super().__init__()
        self.output = linear(width // 2, choices, SMALL_GAIN)

    def forward(self, slots: Tensor) -> Tensor:  # [..., K, H] -> [..., K, choices]
        return self.output(slots)


class HostHeads(nn.Module):
    """Heads of the actions of hosts. The numbers of slots and blueprints in `space` determine no weights."""

    def __init__(self, width: int, space: ActionSpace) -> None:
        super().__init__()
        shapes = host_table_shapes(space.sizes)
        self.sizes = {head: choices for head, (_, choices) in shapes.items()}  # of each head on the training hosts
        self.of_slot, self.of_core = linear(width, width // 2), linear(width, width // 2)
        ops = self.sizes["op"]
        self.tables = nn.ModuleDict(
            {"op": CoreTable(width, ops), "slot": SlotTable(width, ops), "blueprint": BlueprintTable(width)}
            | {head: RowTable(width, self.sizes[head]) for head in ("style", "tempo") if head in self.sizes}
        )

    def encode_slots(self, hidden: Hidden) -> Tensor:  # [..., K, H]
        return F.relu(self.of_slot(hidden.slots) + self.of_core(hidden.core).unsqueeze(-2))

    def forward(self, hidden: Hidden) -> HeadTables:
        slots = self.encode_slots(hidden)
        return {head: self.table(head, hidden.core, hidden.blueprints, slots) for head in self.sizes}

    def table(self, head: str, core: Tensor, blueprints: Tensor | None, slots: Tensor) -> Tensor:
        """Return the logits of one head, [..., rows, choices], given core [..., W], encoded slots [..., K, H] and
        blueprints [..., K, B, H]."""
        inputs = {"op": (core,), "slot": (core, slots), "blueprint": (blueprints, slots)}.get(head, (slots,))
        return self.tables[head](*inputs)

    def distribution(self, hidden: Hidden, masks: Masks) -> HostDistribution:
        """Return the distribution over actions [...] for hidden features [...]."""
        return HostDistribution(self(hidden), masks)

    def decide(self, hidden: Hidden, masks: Masks) -> Action:
        """Return the most likely action of each host, [N]: the mode of `distribution`.

        What follows the slot is computed for the chosen one alone: all of it would take most of the time.
        """
        core, slots, blueprints = hidden.core, self.encode_slots(hidden), hidden.blueprints
        assert blueprints is not None, "those of hosts"
        chosen: dict[str, Tensor] = {}
        for head in self.sizes:
            if HOST_PARENTS.get(head) == "slot":
                of_chosen = torch.arange(len(core), device=core.device), chosen["slot"]
                logits = self.table(head, core, blueprints[of_chosen].unsqueeze(1), slots[of_chosen].unsqueeze(1))
                mask = masks.blueprint[of_chosen] if head == "blueprint" else torch.ones_like(logits[:, 0]).bool()
                logits = logits.squeeze(-2)
            else:
                table, row = self.table(head, core, blueprints, slots), chosen.get(HOST_PARENTS.get(head, ""))
                logits, mask = (select_row(part, row) for part in (table, host_mask(head, masks, table)))
            chosen[head] = masked_log_softmax(logits, mask).argmax(-1)
        return host_action(chosen)


class ChoiceHeads(nn.Module):
    """Heads of any other action space, as `HostHeads`."""

    def __init__(self, width: int, space: ChoiceSpace) -> None:
        super().__init__()
        self.space = space
        self.sizes: Mapping[str, int] = space.sizes
        self.tables = nn.ModuleDict({head: CoreTable(width, choices) for head, choices in space.sizes.items()})

    def forward(self, hidden: Hidden) -> HeadTables:
        return {head: table(hidden.core) for head, table in self.tables.items()}

    def distribution(self, hidden: Hidden, masks: ChoiceMasks) -> ChoiceDistribution:
        return ChoiceDistribution(self(hidden), masks, self.space)

    def decide(self, hidden: Hidden, masks: ChoiceMasks) -> ChoiceAction:
        return self.distribution(hidden, masks).mode()
