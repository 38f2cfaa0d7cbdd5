"""Actions on a host: operations, heads and the choices of each head. N environments, K slots."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from itertools import product
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from esper_lightning.blueprints import find_blueprint, suggest_name
from esper_lightning.envs.device_transfer import copy_to_device
from esper_lightning.growth.alpha import Curve
from esper_lightning.growth.blend import BlendStyle


class Op(IntEnum):
    """Operations on a slot. The numbers are the choices of the head `op`."""

    WAIT = 0
    GERMINATE = 1
    CULL = 2
    FOSSILIZE = 3
    ADVANCE = 4
    SET_ALPHA = 5


class ActionError(ValueError):
    """Error of an action that is none, or that the masks forbid; no host has changed."""


class Action(NamedTuple):
    """One action per environment, as an index per head; heads that the op does not use are 0."""

    op: Tensor  # [..., N] int64, like every field
    slot: Tensor
    blueprint: Tensor
    style: Tensor  # blend style and curve of the alpha ramp
    tempo: Tensor  # duration of the alpha ramp
    target: Tensor  # target of alpha
    speed: Tensor  # duration of a change of alpha or of a cull
    curve: Tensor  # curve of a change of alpha or of a slow cull


HEADS = Action._fields

CHOICES_KEY = "choices of the {} head"
"""Key of a head's choices in the identity of a run."""

RELEVANT_OPS: dict[str, frozenset[Op]] = {
    "op": frozenset(Op),
    "slot": frozenset(Op) - {Op.WAIT},
    "blueprint": frozenset({Op.GERMINATE}),
    "style": frozenset({Op.GERMINATE}),
    "tempo": frozenset({Op.GERMINATE}),
    "target": frozenset({Op.SET_ALPHA}),
    "speed": frozenset({Op.SET_ALPHA, Op.CULL}),
    "curve": frozenset({Op.SET_ALPHA, Op.CULL}),
}
"""Ops for which each head has an effect. Only then does a head contribute log-probability, entropy and gradient.

A change at speed 0 has no curve; there the mask leaves a single choice, which contributes nothing either.
"""

STYLES: dict[str, tuple[Curve, BlendStyle]] = {
    f"{curve}_{style}": (curve, style) for curve, style in product(get_args(Curve), get_args(BlendStyle))
}
"""Choices of the head `style` by name: `linear_add`, `sigmoid12_add`, `linear_multiply`, `linear_gate` …"""


@cache
def relevance_table(device: torch.device | None = None) -> Tensor:  # [ops, heads] float
    """Return a read-only table: 1 where an op uses a head, else 0. It is cached: creating it waits for the device."""
    with torch.inference_mode(False):  # usable in autograd even if first created in inference mode
        return torch.tensor(
            [[op in RELEVANT_OPS[head] for head in HEADS] for op in Op], dtype=torch.float32, device=device
        )


def zero_irrelevant_heads(action: Action, relevant: Tensor) -> Action:
    """Set the heads that the op does not use to 0, so that equivalent actions have equal indices.

    Args:
        action: Actions of N environments.
        relevant: Table of `relevance_table` on the action's device, [ops, heads].
    """
    is_relevant = relevant[action.op].long()  # [..., heads]
    return Action(*(head * is_relevant[..., i] for i, head in enumerate(action)))


@dataclass(frozen=True, kw_only=True)
class ActionConfig:
    """Choices that each head offers. A head with one choice has no effect on learning."""

    blueprints: list[str] | None = None
    """Names or import paths of the blueprints of seeds to offer. None: all of this package that fit the host's
    features; your own are offered only where they are named."""

    styles: list[str] = field(default_factory=lambda: ["linear_add"])
    """Blend styles: a curve of the alpha ramp (linear, cosine, sigmoid6, sigmoid12, sigmoid24), an underscore, and
    how the seed's output combines with the host's feature (add, multiply, gate)."""

    tempos: dict[str, int] = field(default_factory=lambda: {"FAST": 3, "STANDARD": 5, "SLOW": 8})
    """Duration of blending in host epochs, by name of the tempo."""

    advance: bool = False
    """Offer ADVANCE, for seeds that do not advance automatically (lifecycle.auto_blend, auto_probation)."""

    set_alpha: bool = False
    """Offer SET_ALPHA, which moves a blended seed's alpha to one of `targets`."""

    slow_cull: bool = False
    """Offer slow culls of blended seeds: alpha first falls to 0 over one of `speeds`."""

    targets: list[float] = field(default_factory=lambda: [0.5, 0.7, 1.0])
    """Targets of alpha that SET_ALPHA offers, in (0, 1]."""

    speeds: list[int] = field(default_factory=lambda: [0, 3, 5, 8])
    """Durations of a change of alpha or a slow cull in host epochs; the first must be 0, an immediate change."""

    curves: list[Curve] = field(default_factory=lambda: ["linear"])
    """Curves of a change of alpha or a slow cull."""

    max_seeds: int | None = None
    """Maximum number of slots that hold a seed at the same time. None: all of them."""

    def __post_init__(self) -> None:
        if self.blueprints is not None:
            object.__setattr__(self, "blueprints", [find_blueprint(name) for name in self.blueprints])
        for name in self.styles:
            if name not in STYLES:
                raise ValueError(f"actions.styles: unknown style {name!r}; {suggest_name(name, list(STYLES))}")
        for name in ("blueprints", "styles", "targets", "speeds", "curves"):
            choices = getattr(self, name)
            if choices is None:
                continue
            if not choices:
                raise ValueError(f"actions.{name} is empty; name at least one, or leave it out for the default")
            choice, occurrences = Counter(choices).most_common(1)[0]
            if occurrences > 1:
                raise ValueError(f"actions.{name}: {choice!r} is named twice; name each once")
        if not self.tempos or min(self.tempos.values()) < 1:
            raise ValueError(f"actions.tempos needs at least one tempo of at least 1 host epoch, got {self.tempos}")
        if not all(0.0 < target <= 1.0 for target in self.targets):
            raise ValueError(f"actions.targets must lie in (0, 1], got {self.targets}; to send alpha to 0, cull")
        if self.speeds[0] != 0 or min(self.speeds) < 0:
            raise ValueError(f"actions.speeds must begin with 0 (at once) and hold no negative, got {self.speeds}")
        if self.max_seeds is not None and self.max_seeds < 1:
            raise ValueError(f"actions.max_seeds must be at least 1, got {self.max_seeds}")

    def make_space(self, slots: list[str], blueprints: list[str]) -> "ActionSpace":
        """Return the action space of a host with these slots and blueprints."""
        last_op = Op.SET_ALPHA if self.set_alpha else Op.ADVANCE if self.advance else Op.FOSSILIZE
        has_timed_changes = self.set_alpha or self.slow_cull
        return ActionSpace(
            op=[Op(number).name for number in range(last_op + 1)],
            slot=slots,
            blueprint=blueprints,
            style=self.styles,
            tempo=list(self.tempos),
            target=self.targets if self.set_alpha else self.targets[-1:],
            speed=self.speeds if has_timed_changes else self.speeds[:1],
            curve=self.curves if has_timed_changes and len(self.speeds) > 1 else self.curves[:1],
        )


class ActionSpace(NamedTuple):
    """Choices of each head for one pool; the numbers of an action index them."""

    op: list[str]
    slot: list[str]
    blueprint: list[str]
    style: list[str]
    tempo: list[str]
    target: list[float]
    speed: list[int]
    curve: list[Curve]

    @property
    def sizes(self) -> dict[str, int]:
        """Number of choices of each head."""
        return {head: len(choices) for head, choices in zip(HEADS, self, strict=True)}

    def zeros(self, n_envs: int, device: torch.device) -> Action:
        """Return an action of zeros for `n_envs` environments, as storage."""
        return Action(*(torch.zeros(n_envs, dtype=torch.int64, device=device) for _ in HEADS))

    def iter_heads(self, action: Action) -> Iterator[tuple[Tensor, int]]:
        """Iterate over the heads: chosen indices [..., N] and number of choices."""
        return zip(action, self.sizes.values(), strict=True)

    def describe(self, action: Sequence[int]) -> str:
        """Describe one environment's action, as in `GERMINATE conv_light in block1.pool (FAST, linear_add)`."""
        chosen = self.decode(action)
        change = "at once" if chosen.speed == 0 else f"in {chosen.speed} ticks, {chosen.curve}"
        match Op(action[0]):
            case Op.WAIT:
                return "WAIT"
            case Op.GERMINATE:
                return f"GERMINATE {chosen.blueprint} in {chosen.slot} ({chosen.tempo}, {chosen.style})"
            case Op.CULL:
                return f"CULL {chosen.slot} ({change})"
            case Op.SET_ALPHA:
                return f"SET_ALPHA {chosen.slot} to {chosen.target:g} ({change})"
            case op:
                return f"{op.name} {chosen.slot}"

    def decode(self, action: Sequence[int]) -> "DecodedAction":
        """Return the choices that the indices of one environment's action stand for."""
        return DecodedAction._make(choices[number] for choices, number in zip(self, action, strict=True))


class DecodedAction(NamedTuple):
    """Action of one environment, with the chosen values in place of indices."""

    op: str
    slot: str
    blueprint: str
    style: str
    tempo: str
    target: float
    speed: int
    curve: Curve


def pad_action(row: Sequence[int]) -> Sequence[int]:
    """Return an index for each head; those missing at the end of `row` are 0.

    Raises ActionError if a row is no list, or has more indices than there are heads.
    """
    if not hasattr(row, "__len__"):
        raise ActionError(f"the action of one host is a list, as [op, slot, blueprint, …]; got {row!r:.50}")
    if len(row) > len(HEADS):
        raise ActionError(f"an action has at most {len(HEADS)} indices, {', '.join(HEADS)}; got {len(row)}")
    return row if len(row) == len(HEADS) else [*row, *[0] * (len(HEADS) - len(row))]


def to_action(rows: Sequence[Sequence[int]], device: torch.device) -> Action:
    """Build an action from one row of indices per environment; heads missing at the end of a row become 0.

    Raises ActionError if a row is no list, or has more indices than there are heads.
    """
    padded = [[*pad_action(row)] for row in rows]
    return Action(*copy_to_device(torch.tensor(padded), device).unbind(1))


def check_is_action(action: Any, n_envs: int) -> None:
    """Raise ActionError unless an object has one tensor of whole numbers per head, with one index per environment."""
    parts = action if isinstance(action, tuple) else ()
    fits = [isinstance(part, Tensor) and part.shape == (n_envs,) and not part.is_floating_point() for part in parts]
    if len(parts) != len(HEADS) or not all(fits):
        kinds = [
            f"{part.dtype} of shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            for part in parts
        ]
        got = f"{len(parts)} × {', '.join(dict.fromkeys(kinds))}" if parts else f"a {type(action).__name__}"
        raise ActionError(
            f"an action is made by to_action([[op, slot, blueprint, …], …], pool.device) from a row of whole numbers "
            f"for each of the {n_envs} hosts; got {got:.200}"
        )
