"""Which actions are possible now: an impossible one is never offered, so no decision is wasted."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs.actions import ActionConfig, Op
from esper_lightning.growth.gates import Evidence, LifecycleConfig
from esper_lightning.growth.network import may_cull, may_fossilize
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage


class Masks(NamedTuple):
    """True where a choice is possible."""

    slot: Tensor  # [..., N, ops, K] bool: may this op be done to this slot? WAIT: True for all
    blueprint: Tensor  # [..., N, K, P] bool: does this blueprint grow in this slot?

    @property
    def op(self) -> Tensor:  # [..., N, ops] bool
        return self.slot.any(-1)

    @property
    def forced(self) -> Tensor:  # [..., N] bool: only one op is possible, so there is nothing to learn from the step
        return self.op.sum(-1) == 1


def legal(
    slots: list[SeedSlot], evidence: list[Evidence], lifecycle: LifecycleConfig, actions: ActionConfig
) -> list[list[bool]]:
    """May op o be done to slot k of one environment? Rows are ops."""
    room = actions.max_seeds is None or sum(slot.occupied for slot in slots) < actions.max_seeds
    possible = {
        Op.WAIT: [True for _ in slots],
        Op.GERMINATE: [room and slot.stage is Stage.DORMANT for slot in slots],
        Op.CULL: [may_cull(slot, lifecycle) for slot in slots],
        Op.FOSSILIZE: [may_fossilize(slot, seen, lifecycle) for slot, seen in zip(slots, evidence, strict=True)],
    }
    return [possible[op] for op in Op]


def make_masks(n_envs: int, growable: Tensor, device: torch.device) -> Masks:
    """Storage for the masks of `n_envs` environments; `growable` [K, P] is the same for all of them, always."""
    slots = growable.shape[0]
    return Masks(
        slot=torch.zeros(n_envs, len(Op), slots, dtype=torch.bool, device=device),
        blueprint=growable.to(device).expand(n_envs, -1, -1),
    )
