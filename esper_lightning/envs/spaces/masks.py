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
    """Masks of N environments with K slots: True where a choice is possible. Other heads are never masked."""

    slot: Tensor  # [..., N, ops, K] bool: this op is possible on this slot; WAIT: always True
    blueprint: Tensor  # [..., N, K, blueprints] bool: this blueprint can grow in this slot
    target: Tensor  # [..., N, K, targets] bool: this target differs from the slot's present one
    speed: Tensor  # [..., N, ops, K, speeds] bool: this op on this slot may take so long
    curve: Tensor  # [..., N, speeds, curves] bool: curves for a change of this speed; one at speed 0
    ended: Tensor  # [..., N] bool: the episode ended before the horizon, so actions have no effect

    def allows(self, env: int, action: Sequence[int]) -> bool:
        """Return True if environment `env` may take an action, an index per head; irrelevant heads are not checked.

        Heads missing at the end of the action are 0.
        """
        op, slot, blueprint, _, _, target, speed, curve = pad_action(action)
        needed = [self.slot[env, op, slot]]
        if op == Op.GERMINATE:
            needed.append(self.blueprint[env, slot, blueprint])
        if op == Op.SET_ALPHA:
            needed.append(self.target[env, slot, target])
        if op in (Op.CULL, Op.SET_ALPHA):
            needed += [self.speed[env, op, slot, speed], self.curve[env, speed, curve]]
        return all(needed)

    @property
    def op(self) -> Tensor:  # [..., N, ops] bool
        return self.slot.any(-1)

    @property
    def forced(self) -> Tensor:  # [..., N] bool
        """True where the step teaches nothing: only one op is possible, or the episode has ended (masks or none)."""
        return (self.op.sum(-1) == 1) | self.ended


class HostMasks(NamedTuple):
    """Masks of one environment that change from step to step, as nested lists."""

    slot: list[list[bool]]  # [ops, K]
    target: list[list[bool]]  # [K, targets]
    speed: list[list[list[bool]]]  # [ops, K, speeds]
    ended: bool


def compute_masks(
    growing: GrowingNetwork,
    refusals: Sequence[RefusalReasons],
    space: ActionSpace,
    *,
    config: ActionConfig,
    ended: bool = False,
) -> HostMasks:
    """Compute the masks of one environment; only WAIT is possible if its episode has `ended`.

    Args:
        growing: Host and slots.
        refusals: Reasons of the lifecycle gates against stage changes of the seed in each slot, [K].
        space: Choices of each head.
        config: Ops on offer and the maximum number of seeds.
        ended: True if the episode ended before the horizon.
    """
    slots = growing.slots
    has_room = config.max_seeds is None or sum(slot.occupied for slot in slots.values()) < config.max_seeds
    target = [[choice != slot.ramp.target for choice in space.target] for slot in slots.values()]
    possible = {
        Op.WAIT: [True for _ in slots],
        Op.GERMINATE: [has_room and slot.stage is Stage.DORMANT and slot.layout != ABSENT for slot in slots.values()],
        Op.CULL: [not reasons.culling for reasons in refusals],
        Op.FOSSILIZE: [not reasons.fossilizing for reasons in refusals],
        Op.ADVANCE: [config.advance and not reasons.advancing for reasons in refusals],
        Op.SET_ALPHA: [slot.ramping and any(row) for slot, row in zip(slots.values(), target, strict=True)],
    }
    if ended:
        possible |= {op: [False for _ in slots] for op in possible if op is not Op.WAIT}
    ops = [Op[name] for name in space.op]
    slow_allowed = {
        Op.CULL: [config.slow_cull and slot.ramping and not slot.fading for slot in slots.values()],
        Op.SET_ALPHA: [slot.ramping for slot in slots.values()],
    }
    never_slow = [False for _ in slots]
    speed = [[[ticks == 0 or slow for ticks in space.speed] for slow in slow_allowed.get(op, never_slow)] for op in ops]
    return HostMasks([possible[op] for op in ops], target, speed, ended)


def make_masks(n_envs: int, space: ActionSpace, growable: Tensor) -> Masks:
    """Allocate masks of `n_envs` environments on the CPU; `growable` [K, blueprints] bool is constant."""
    sizes = space.sizes
    slots = sizes["slot"]
    # A change at speed 0 has no curve; it always takes the first one, so that equivalent actions are equal.
    curve = torch.tensor([[ticks > 0 or c == 0 for c in range(sizes["curve"])] for ticks in space.speed])
    return Masks(
        slot=torch.zeros(n_envs, sizes["op"], slots, dtype=torch.bool),
        blueprint=growable.expand(n_envs, -1, -1),
        target=torch.zeros(n_envs, slots, sizes["target"], dtype=torch.bool),
        speed=torch.zeros(n_envs, sizes["op"], slots, sizes["speed"], dtype=torch.bool),
        curve=curve.expand(n_envs, -1, -1),
        ended=torch.zeros(n_envs, dtype=torch.bool),
    )


def op_frequency(op: Tensor, masks: Masks) -> dict[str, float]:
    """Return the share of each op among the actions `op` [..., N] that were not forced."""
    counts = torch.bincount(op[~masks.forced], minlength=masks.slot.shape[-2]).tolist()
    return {Op(op).name: count / max(1, sum(counts)) for op, count in enumerate(counts)}
