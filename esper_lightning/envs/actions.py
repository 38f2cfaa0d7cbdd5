"""What a controller can do to a host. N environments, K slots, P blueprints, M tempos."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.blueprints import get


class Op(IntEnum):
    """What can be done to a slot. The numbers are the op head's choices."""

    WAIT = 0
    GERMINATE = 1
    CULL = 2
    FOSSILIZE = 3


class Action(NamedTuple):
    """One decision per environment; heads that do not matter for the op are 0."""

    op: Tensor  # [..., N] int64
    slot: Tensor  # [..., N] int64
    blueprint: Tensor  # [..., N] int64
    tempo: Tensor  # [..., N] int64


HEADS = Action._fields

RELEVANT: dict[str, frozenset[Op]] = {
    "op": frozenset(Op),
    "slot": frozenset({Op.GERMINATE, Op.CULL, Op.FOSSILIZE}),
    "blueprint": frozenset({Op.GERMINATE}),
    "tempo": frozenset({Op.GERMINATE}),
}
"""For which ops a head's choice has any effect. Only then may it carry log-probability, entropy or gradient."""


def relevance(device: torch.device | None = None) -> Tensor:  # [ops, heads] float: RELEVANT as numbers
    """1 where a head matters for an op, else 0."""
    return torch.tensor([[float(op in RELEVANT[head]) for head in HEADS] for op in Op], device=device)


def blank_irrelevant(action: Action, relevant: Tensor) -> Action:
    """The same decision with every choice that does not matter for its op as 0: equal decisions are equal actions.

    `relevant` is the table of `relevance`, on the action's device.
    """
    matters = relevant[action.op].long()  # [..., heads]
    return Action(*(head * matters[..., i] for i, head in enumerate(action)))


@dataclass(frozen=True, kw_only=True)
class ActionConfig:
    """Which choices the heads offer."""

    blueprints: list[str] | None = None
    """Seeds on offer. None: all that can grow on the host's features."""

    tempos: dict[str, int] = field(default_factory=lambda: {"FAST": 3, "STANDARD": 5, "SLOW": 8})
    """Host epochs that blending takes, by name of the tempo."""

    max_seeds: int | None = None
    """Most slots that may hold a seed at once. None: all of them."""

    def __post_init__(self) -> None:
        if self.blueprints is not None:
            if not self.blueprints:
                raise ValueError("actions.blueprints is empty; name at least one, or leave it out for all")
            for name in self.blueprints:
                get(name)
                if self.blueprints.count(name) > 1:
                    raise ValueError(f"blueprint {name!r} is named twice; name each blueprint once")
        if not self.tempos or min(self.tempos.values()) < 1:
            raise ValueError(f"actions.tempos needs at least one tempo of at least 1 host epoch, got {self.tempos}")
        if self.max_seeds is not None and self.max_seeds < 1:
            raise ValueError(f"actions.max_seeds must be at least 1, got {self.max_seeds}")


class ActionSpace(NamedTuple):
    """The choices of one pool, by name; an action's numbers index them."""

    slots: list[str]
    blueprints: list[str]
    tempos: list[str]

    def describe(self, decision: Sequence[int]) -> str:
        """`GERMINATE conv_light in block1.pool (FAST)`: one environment's decision, a number per head, in words."""
        op, slot, blueprint, tempo = decision
        if op == Op.WAIT:
            return "WAIT"
        if op == Op.GERMINATE:
            return f"GERMINATE {self.blueprints[blueprint]} in {self.slots[slot]} ({self.tempos[tempo]})"
        return f"{Op(op).name} {self.slots[slot]}"
