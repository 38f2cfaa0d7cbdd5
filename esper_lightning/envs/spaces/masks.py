"""Action masks: True where a choice is possible in the present state of an environment."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs.spaces.actions import ActionConfig, ActionSpace, Op, pad_action
from esper_lightning.growth.growing_network import GrowingNetwork, RefusalReasons
from esper_lightning.growth.slot import ABSENT
from esper_lightning.growth.stages import Stage


class Masks(NamedTuple):
    """Masks of N environments with K slots: True where a choice is possible. Styles and tempos are never masked."""

    slot: Tensor  # [..., N, ops, K] bool: this op is possible on this slot; WAIT: always True
    blueprint: Tensor  # [..., N, K, blueprints] bool: this blueprint can grow in this slot
    ended: Tensor  # [..., N] bool: the episode ended before the horizon, so actions have no effect

    def allows(self, env: int, action: Sequence[int]) -> bool:
        """Return True if environment `env` may take an action, an index per head; irrelevant heads are not checked.

        Heads missing at the end of the action are 0.
        """
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


def possible_ops(
    growing: GrowingNetwork, refusals: Sequence[RefusalReasons], config: ActionConfig, *, ended: bool
) -> list[list[bool]]:
    """Return which op is possible on which slot of one environment, [ops][K], whatever can grow there.

    Args:
        growing: Host and slots.
        refusals: Reasons of the lifecycle gates against stage changes of the seed in each slot, [K].
        config: Settings with the maximum number of seeds.
        ended: True if the episode ended before the horizon: then only WAIT is possible.
    """
    slots = list(growing.slots.values())
    has_room = config.max_seeds is None or sum(slot.occupied for slot in slots) < config.max_seeds
    possible = {
        Op.WAIT: [True for _ in slots],
        Op.GERMINATE: [has_room and slot.stage is Stage.DORMANT and slot.layout != ABSENT for slot in slots],
        Op.CULL: [not reasons.culling for reasons in refusals],
        Op.FOSSILIZE: [not reasons.fossilizing for reasons in refusals],
    }
    return [[may and not (ended and op is not Op.WAIT) for may in possible[op]] for op in Op]


def make_masks(n_envs: int, space: ActionSpace, growable: Tensor) -> Masks:
    """Allocate masks of `n_envs` environments on the CPU; `growable` bool is [K, blueprints] for all of them, or
    [N, K, blueprints]."""
    return Masks(
        slot=torch.zeros(n_envs, len(Op), len(space.slot), dtype=torch.bool),
        blueprint=growable.expand(n_envs, -1, -1),
        ended=torch.zeros(n_envs, dtype=torch.bool),
    )
