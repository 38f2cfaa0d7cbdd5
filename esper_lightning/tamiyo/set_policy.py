"""Network of a policy over sets: the number of its weights depends on neither slots nor blueprints.

It reads an observation in rows (`env.sight.layout: rows`). Every blueprint in a slot and every slot is encoded by the
same layers; slots exchange information through the mean and the maximum over their rows (Zaheer et al. 2017,
https://arxiv.org/abs/1703.06114), which also feed the recurrent core. The action heads point at rows (Vinyals et al.
2015, https://arxiv.org/abs/1506.03134), so permuting slots or blueprints permutes their probabilities.

T steps, N environments, K slots, B blueprints, W = width of the policy, H = W // 2.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import Action, Masks
from esper_lightning.envs.spaces.actions import ActionSpace, relevance_table
from esper_lightning.tamiyo.heads import (
    HeadTables,
    HostDistribution,
    check_floors,
    head_mask,
    host_action,
    masked_log_softmax,
    row_index,
    select_row,
    table_shapes,
)
from esper_lightning.tamiyo.policy import Policy, PolicyConfig, PolicyShape, RecurrentState


class SetHidden(NamedTuple):
    """Hidden features of hosts."""

    core: Tensor  # [..., W] of the host as a whole, with memory
    slots: Tensor  # [..., K, W]
    blueprints: Tensor  # [..., K, B, H] of each blueprint in each slot

    def first(self) -> "SetHidden":
        """Return the features of the first step."""
        return SetHidden(*(part[0] for part in self))

    def of_slot(self, slot: Tensor) -> "SetHidden":  # K = 1
        """Return the features with those of one slot of each host, `slot` [N], alone."""
        return SetHidden(self.core, select_slot(self.slots, slot), select_slot(self.blueprints, slot))


def select_slot(part: Tensor, slot: Tensor) -> Tensor:  # [N, K, …] -> [N, 1, …]
    """Return the part of one slot of each host, `slot` [N]."""
    return part[torch.arange(len(slot), device=slot.device), slot].unsqueeze(1)


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """Return a linear layer with orthogonal weights and without initial bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


SMALL_GAIN = 0.01
"""Gain of the layers that end in logits: at first all choices are about equally likely."""


def pool_rows(rows: Tensor, present: Tensor) -> Tensor:  # [..., n, C] -> [..., 2·C]
    """Return mean and maximum over the rows that are `present` [..., n], 1 or 0; 0 if none is.

    Rows must not be negative.
    """
    kept = rows * present.unsqueeze(-1)
    mean = kept.sum(-2) / present.sum(-1, keepdim=True).clamp(min=1)
    return torch.cat([mean, kept.amax(-2)], -1)


class CoreTable(nn.Module):
    """Logits of `choices` for each of `contexts` from the core alone."""

    def __init__(self, width: int, contexts: int, choices: int) -> None:
        super().__init__()
        self.contexts = contexts
        self.layers = nn.Sequential(
            linear(width, width // 2), nn.ReLU(), linear(width // 2, contexts * choices, SMALL_GAIN)
        )

    def forward(self, hidden: SetHidden, slots: Tensor) -> Tensor:  # [..., contexts, choices]
        return self.layers(hidden.core).unflatten(-1, (self.contexts, -1))


class SlotTable(nn.Module):
    """Logits of the slots for each op: the core's query for the op times the slot's key, plus the slot's own merit."""

    def __init__(self, width: int, ops: int) -> None:
        super().__init__()
        self.ops = ops
        self.query = linear(width, ops * (width // 2), 0.1)
        self.merit = linear(width // 2, ops, SMALL_GAIN)

    def forward(self, hidden: SetHidden, slots: Tensor) -> Tensor:  # [..., ops, K]
        query = self.query(hidden.core).unflatten(-1, (self.ops, -1))  # [..., ops, H]
        return query @ slots.mT / slots.shape[-1] + self.merit(slots).mT


class BlueprintTable(nn.Module):
    """Logits of the blueprints for each slot: the slot's query times the blueprint's key, plus a network of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.query = linear(half, half, 0.1)
        self.of_blueprint, self.of_slot = linear(half, half), linear(half, half)
        self.merit = linear(half, 1, SMALL_GAIN)

    def forward(self, hidden: SetHidden, slots: Tensor) -> Tensor:  # [..., K, B]
        # The blueprints, of which there are most, are their own keys.
        match = (hidden.blueprints @ self.query(slots).unsqueeze(-1)).squeeze(-1) / math.sqrt(slots.shape[-1])
        both = F.relu_(self.of_blueprint(hidden.blueprints).add_(self.of_slot(slots).unsqueeze(-2)))
        return match + self.merit(both).squeeze(-1)


class RowTable(nn.Module):
    """Logits of `choices` for each slot, or for each pair of one of `contexts` and a slot."""

    def __init__(self, width: int, contexts: int, choices: int) -> None:
        super().__init__()
        self.contexts = contexts
        self.output = linear(width // 2, contexts * choices, SMALL_GAIN)

    def forward(self, hidden: SetHidden, slots: Tensor) -> Tensor:  # [..., contexts · K, choices]
        return self.output(slots).unflatten(-1, (self.contexts, -1)).transpose(-3, -2).flatten(-3, -2)


FIRST_HEADS = ("op", "slot")
"""Heads that are chosen before all others."""


class SetHeads(nn.Module):
    """Logits of all heads, as one table per head; see `Heads`.

    Args:
        width: Width W of the policy.
        space: Action space of the training hosts; the numbers of its slots and blueprints determine no weights.
        floors: Least probability of each possible choice, by head; the other heads have none.

    Raises ValueError if a floor is for a head without a choice, or too high for the number of choices.
    """

    def __init__(self, width: int, space: ActionSpace, floors: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.floors = dict(floors or {})
        sizes = space.sizes
        # Number of choices of each head on the training hosts.
        self.sizes = {head: choices for head, (_, choices) in table_shapes(sizes).items()}
        check_floors(self.floors, {head: choices for head, choices in self.sizes.items() if choices > 1})
        self.of_slot, self.of_core = linear(width, width // 2), linear(width, width // 2)
        ops, speeds = sizes["op"], sizes["speed"]
        makers = {
            "op": lambda: CoreTable(width, 1, ops),
            "slot": lambda: SlotTable(width, ops),
            "blueprint": lambda: BlueprintTable(width),
            "style": lambda: RowTable(width, 1, sizes["style"]),
            "tempo": lambda: RowTable(width, 1, sizes["tempo"]),
            "target": lambda: RowTable(width, 1, sizes["target"]),
            "speed": lambda: RowTable(width, ops, speeds),
            "curve": lambda: CoreTable(width, speeds, sizes["curve"]),
        }
        self.tables = nn.ModuleDict({head: makers[head]() for head in self.sizes})

    def forward(self, hidden: SetHidden) -> HeadTables:
        slots = self._encode_slots(hidden)
        return {head: table(hidden, slots) for head, table in self.tables.items()}

    def _encode_slots(self, hidden: SetHidden) -> Tensor:  # [..., K, H]
        return F.relu(self.of_slot(hidden.slots) + self.of_core(hidden.core).unsqueeze(-2))

    def distribution(self, hidden: SetHidden, masks: Masks) -> HostDistribution:
        """Return the distribution over actions [...] for hidden features [...]."""
        return HostDistribution(self(hidden), masks, self.floors)

    def decide(self, hidden: SetHidden, masks: Masks) -> Action:
        """Return the most likely action of each host, [N]: the mode of `distribution`.

        What follows the slot is computed for the chosen one alone: all of it would take most of the time.
        """
        slots = self._encode_slots(hidden)
        first = self._most_likely(hidden, slots, masks, given={})
        slot = first["slot"]
        chosen = self._most_likely(
            hidden.of_slot(slot),
            select_slot(slots, slot),
            mask_slot(masks, slot),
            given=first | {"slot": torch.zeros_like(slot)},
        )
        return host_action(chosen | {"slot": slot}, relevance_table(slot.device)[: masks.slot.shape[-2]])

    def _most_likely(
        self, hidden: SetHidden, slots: Tensor, masks: Masks, *, given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the most likely choice of the op and the slot, or if these are `given`, of all further heads too."""
        chosen = dict(given)
        for head, table in self.tables.items():
            if (head in FIRST_HEADS) == bool(given):
                continue
            logits = table(hidden, slots)
            row = row_index(head, chosen, slots.shape[-2])
            mask = select_row(head_mask(head, masks, logits), row)
            chosen[head] = masked_log_softmax(select_row(logits, row), mask).argmax(-1)
        return chosen


def mask_slot(masks: Masks, slot: Tensor) -> Masks:  # K = 1
    """Return the masks with those of one slot of each host, `slot` [N], alone."""
    return masks._replace(
        slot=select_slot(masks.slot.mT, slot).mT,
        blueprint=select_slot(masks.blueprint, slot),
        target=select_slot(masks.target, slot),
        speed=select_slot(masks.speed.transpose(1, 2), slot).transpose(1, 2),
    )


class SetPolicy(Policy):
    """Policy and critic over sets of slots and blueprints; see `Policy`.

    Args:
        shape: Sizes of inputs and outputs, with rows.
        config: Size and architecture.
    """

    def _make_inputs(self, shape: PolicyShape, config: PolicyConfig) -> int:
        assert shape.rows is not None, "a policy over sets reads rows"
        self.rows = shape.rows
        width, half = config.width, config.width // 2
        self.blueprint_encoder = nn.Sequential(
            linear(self.rows.blueprint, half), nn.ReLU(inplace=True), linear(half, half), nn.ReLU(inplace=True)
        )
        self.slot_encoder = nn.Sequential(linear(self.rows.slot + 2 * half, width), nn.LayerNorm(width), nn.ReLU())
        return self.rows.host + 2 * width

    def _make_heads(self, shape: PolicyShape, config: PolicyConfig) -> SetHeads:
        assert isinstance(shape.space, ActionSpace), "rows are those of hosts"
        return SetHeads(config.width, shape.space, config.probability_floors)

    def encode(self, observation: Any, state: RecurrentState, starts: Tensor) -> tuple[SetHidden, RecurrentState]:
        """Return the hidden features [T, N, …] of T steps and the state after the last one: see `forward`."""
        (features,) = observation
        host, slot, blueprint = self.rows.split(features)
        blueprint = blueprint.contiguous()
        blueprints = self.blueprint_encoder(blueprint)  # [T, N, K, B, H]
        in_slot = pool_rows(blueprints, blueprint[..., 0])
        slots = self.slot_encoder(torch.cat([slot, in_slot], -1))  # [T, N, K, W]
        on_host = pool_rows(slots, slot[..., 0])
        core, state = self._encode_host(torch.cat([host, on_host], -1), state, starts)
        return SetHidden(core, slots, blueprints), state

    def _encode_step(self, observation: Any, state: RecurrentState, starts: Tensor) -> tuple[SetHidden, RecurrentState]:
        hidden, state = self.encode([part[None] for part in observation], state, starts[None])
        return hidden.first(), state

    def _run_lstm(self, x: Tensor, state: RecurrentState, starts: Tensor) -> tuple[Tensor, RecurrentState]:
        if self.lstm is None or len(x) > 1 or torch.is_grad_enabled():
            return super()._run_lstm(x, state, starts)
        # A decision is one step, for which torch's LSTM takes twice as long as its cell.
        before = tuple(part * ~starts[0, :, None] for part in state)
        after = RecurrentState(*torch.lstm_cell(x[0], before, *self.lstm.all_weights[0]))
        return after.hidden[None], after

    def _critic_value(self, hidden: SetHidden, privileged: Tensor | None) -> Tensor:  # [...]
        return super()._critic_value(hidden.core, privileged)


def make_policy(shape: PolicyShape, config: PolicyConfig) -> Policy:
    """Return the policy for these sizes: over sets if observations have rows, otherwise for fixed numbers of slots and
    blueprints."""
    return Policy(shape, config) if shape.rows is None else SetPolicy(shape, config)
