"""Actions on a host: operations, heads, the choices of each head, and masks of them. N environments, K slots."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs.measurements import copy_to_device
from esper_lightning.growth.blueprints import find_blueprint


class Op(IntEnum):
    """Operations on a slot. The numbers are the choices of the head `op`."""

    WAIT = 0
    GERMINATE = 1
    CULL = 2
    FOSSILIZE = 3


class ActionError(ValueError):
    """Error of an action that is none, or that the masks forbid; no host has changed."""


class Action(NamedTuple):
    """One action per environment, as an index per head; heads that the op does not use are 0."""

    op: Tensor  # [..., N] int64, like every field
    slot: Tensor
    blueprint: Tensor
    tempo: Tensor  # duration of the alpha ramp


HEADS = Action._fields

RELEVANT_OPS: dict[str, frozenset[Op]] = {
    "op": frozenset(Op),
    "slot": frozenset(Op) - {Op.WAIT},
    "blueprint": frozenset({Op.GERMINATE}),
    "tempo": frozenset({Op.GERMINATE}),
}
"""Ops for which each head has an effect. Only then does a head contribute log-probability, entropy and gradient."""


@cache
def relevance_table(device: torch.device | None = None) -> Tensor:  # [ops, heads] float
    """Return a read-only table: 1 where an op uses a head, else 0. It is cached: creating it waits for the device."""
    with torch.inference_mode(False):  # usable in autograd even if first created in inference mode
        return torch.tensor(
            [[op in RELEVANT_OPS[head] for head in HEADS] for op in Op], dtype=torch.float32, device=device
        )


def zero_irrelevant_heads(action: Action, relevant: Tensor) -> Action:
    """Set the heads that the op does not use, by `relevance_table`, to 0: equivalent actions have equal indices."""
    is_relevant = relevant[action.op].long()  # [..., heads]
    return Action(*(head * is_relevant[..., i] for i, head in enumerate(action)))


@dataclass(frozen=True, kw_only=True)
class ActionConfig:
    """Choices that each head offers. A head with one choice has no effect on learning."""

    blueprints: list[str] | None = None
    """Names or import paths of the blueprints of seeds to offer. None: all of this package that fit the host."""

    tempos: dict[str, int] = field(default_factory=lambda: {"FAST": 3, "STANDARD": 5, "SLOW": 8})
    """Duration of blending in host epochs, by name of the tempo."""

    def __post_init__(self) -> None:
        if self.blueprints is not None:
            if not self.blueprints:
                raise ValueError("actions.blueprints is empty; name at least one, or leave it out for the default")
            object.__setattr__(self, "blueprints", [find_blueprint(name) for name in self.blueprints])
            name, occurrences = Counter(self.blueprints).most_common(1)[0]
            if occurrences > 1:
                raise ValueError(f"actions.blueprints: {name!r} is named twice; name each once")
        if not self.tempos or min(self.tempos.values()) < 1:
            raise ValueError(f"actions.tempos needs at least one tempo of at least 1 host epoch, got {self.tempos}")

    def make_space(self, slots: list[str], blueprints: list[str]) -> "ActionSpace":
        return ActionSpace([op.name for op in Op], slots, blueprints, list(self.tempos))


class DecodedAction(NamedTuple):
    """Action of one environment, with names in place of indices."""

    op: str
    slot: str
    blueprint: str
    tempo: str


class ActionSpace(NamedTuple):
    """Choices of each head for one pool; the numbers of an action index them."""

    op: list[str]
    slot: list[str]
    blueprint: list[str]
    tempo: list[str]

    @property
    def sizes(self) -> dict[str, int]:
        return {head: len(choices) for head, choices in zip(HEADS, self, strict=True)}

    def zeros(self, n_envs: int, device: torch.device) -> Action:
        """Return an action of zeros for `n_envs` environments, as storage."""
        return Action(*(torch.zeros(n_envs, dtype=torch.int64, device=device) for _ in HEADS))

    def decode(self, action: Sequence[int]) -> DecodedAction:
        """Return the choices that the indices of one environment's action stand for."""
        return DecodedAction._make(choices[number] for choices, number in zip(self, action, strict=True))

    def describe(self, action: Sequence[int]) -> str:
        """Describe one environment's action, as in `GERMINATE conv_light in block1.pool (FAST)`."""
        chosen = self.decode(action)
        match Op(action[0]):
            case Op.WAIT:
                return "WAIT"
            case Op.GERMINATE:
                return f"GERMINATE {chosen.blueprint} in {chosen.slot} ({chosen.tempo})"
            case op:
                return f"{op.name} {chosen.slot}"


def pad_action(row: Sequence[int]) -> Sequence[int]:
    """Return an index for each head; those missing at the end of `row` are 0. Raises ActionError if there are more."""
    if not hasattr(row, "__len__"):
        raise ActionError(f"the action of one host is a list, as [op, slot, blueprint, …]; got {row!r:.50}")
    if len(row) > len(HEADS):
        raise ActionError(f"an action has at most {len(HEADS)} indices, {', '.join(HEADS)}; got {len(row)}")
    return row if len(row) == len(HEADS) else [*row, *[0] * (len(HEADS) - len(row))]


def to_action(rows: Sequence[Sequence[int]], device: torch.device) -> Action:
    """Build an action from one row of indices per environment; heads missing at the end of a row become 0."""
    return Action(*copy_to_device(torch.tensor([[*pad_action(row)] for row in rows]), device).unbind(1))


def check_is_action(action: Any, n_envs: int) -> None:
    """Raise ActionError unless an object, of a user's own controller, has one tensor of N whole numbers per head."""
    heads = action if isinstance(action, tuple) else ()
    fits = [isinstance(head, Tensor) and head.shape == (n_envs,) and not head.is_floating_point() for head in heads]
    if len(heads) != len(HEADS) or not all(fits):
        kinds = [f"{head.dtype} {list(head.shape)}" if isinstance(head, Tensor) else repr(head) for head in heads]
        got = f"{len(heads)} × {', '.join(dict.fromkeys(kinds))}" if heads else f"a {type(action).__name__}"
        raise ActionError(
            f"an action is made by to_action([[op, slot, blueprint, …], …], pool.device) from a row of whole numbers "
            f"for each of the {n_envs} hosts; got {got:.200}"
        )


class Masks(NamedTuple):
    """Masks of N environments with K slots: True where a choice is possible. Tempos are never masked."""

    slot: Tensor  # [..., N, ops, K] bool: this op is possible on this slot; WAIT: always True
    blueprint: Tensor  # [..., N, K, blueprints] bool: this blueprint can grow in this slot
    ended: Tensor  # [..., N] bool: the episode ended before the horizon, so actions have no effect

    def allows(self, env: int, action: Sequence[int]) -> bool:
        """Return True if environment `env` may take an action, an index per head; irrelevant heads are not checked."""
        op, slot, blueprint, *_ = pad_action(action)
        may_grow = op != Op.GERMINATE or bool(self.blueprint[env, slot, blueprint])
        return may_grow and bool(self.slot[env, op, slot])

    @property
    def op(self) -> Tensor:  # [..., N, ops] bool
        return self.slot.any(-1)

    @property
    def forced(self) -> Tensor:  # [..., N] bool
        """True where the step teaches nothing: only one op is possible, or the episode has ended (masks or none)."""
        return (self.op.sum(-1) == 1) | self.ended


def check_possible(space: ActionSpace, masks: Masks, host: int, action: Sequence[int]) -> None:
    """Raise ActionError unless the masks allow an action of a host, an index per head."""
    sizes = tuple(space.sizes.values())
    if not all(0 <= choice < size for choice, size in zip(action, sizes, strict=True)):
        raise ActionError(f"host {host}: {tuple(action)} is no action; the heads {HEADS} have {sizes} choices")
    if not masks.allows(host, action):
        raise ActionError(
            f"host {host}: {space.describe(action)} is masked; choose within the masks, as "
            f"pool.masks_on_cpu.allows(host, action) tells"
        )
