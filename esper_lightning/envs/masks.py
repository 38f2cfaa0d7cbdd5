"""Which actions are possible now: an impossible one is never offered, so no decision is wasted."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs.actions import ActionConfig, ActionSpace, Op
from esper_lightning.growth.growing import GrowingNetwork, Refusals
from esper_lightning.growth.slot import ABSENT
from esper_lightning.growth.stages import Stage


class Masks(NamedTuple):
    """True where a choice is possible. K slots; heads that are not named here may always choose freely."""

    slot: Tensor  # [..., N, ops, K] bool: may this op be done to this slot? WAIT: True for all
    blueprint: Tensor  # [..., N, K, blueprints] bool: does this blueprint grow in this slot?
    target: Tensor  # [..., N, K, targets] bool: is this target another one than the slot's?
    speed: Tensor  # [..., N, ops, K, speeds] bool: may this op on this slot take so long?
    curve: Tensor  # [..., N, speeds, curves] bool: does a change of this speed have a curve to choose?
    ended: Tensor  # [..., N] bool: this episode was over before the horizon, so what is decided here is nothing

    def allow(self, env: int, decision: Sequence[int]) -> bool:
        """May environment `env` of masks [N, …] do this, a number per head? Only heads that matter are looked at."""
        op, slot, blueprint, _, _, target, speed, curve = decision
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
    def forced(self) -> Tensor:  # [..., N] bool: there is nothing to learn from the step
        """Only one op is possible; or the episode is over, whatever a policy without masks may choose."""
        return (self.op.sum(-1) == 1) | self.ended


class Legal(NamedTuple):
    """What changes from tick to tick in the masks of one environment."""

    slot: list[list[bool]]  # [ops, K]
    target: list[list[bool]]  # [K, targets]
    speed: list[list[list[bool]]]  # [ops, K, speeds]
    ended: bool


def legal(
    growing: GrowingNetwork,
    refusals: Sequence[Refusals],
    space: ActionSpace,
    config: ActionConfig,
    ended: bool = False,
) -> Legal:
    """What may be done to each slot of one environment; nothing if its episode has `ended`.

    Args:
        growing: The host and its slots.
        refusals: What the gates have against changes of the seed in each slot, [K].
        space: The choices that the masks are of.
        config: Which ops are offered, and how many seeds may grow at a time.
        ended: The episode was over before the horizon.
    """
    slots = growing.slots
    room = config.max_seeds is None or sum(slot.occupied for slot in slots.values()) < config.max_seeds
    target = [[choice != slot.ramp.target for choice in space.target] for slot in slots.values()]
    possible = {
        Op.WAIT: [True for _ in slots],
        Op.GERMINATE: [room and slot.stage is Stage.DORMANT and slot.layout != ABSENT for slot in slots.values()],
        Op.CULL: [not reasons.culling for reasons in refusals],
        Op.FOSSILIZE: [not reasons.fossilizing for reasons in refusals],
        Op.ADVANCE: [config.advance and not reasons.advancing for reasons in refusals],
        Op.SET_ALPHA: [slot.ramping and any(row) for slot, row in zip(slots.values(), target, strict=True)],
    }
    if ended:
        possible |= {op: [False for _ in slots] for op in possible if op is not Op.WAIT}
    ops = [Op[name] for name in space.op]
    slowly = {
        Op.CULL: [config.slow_cull and slot.ramping and not slot.fading for slot in slots.values()],
        Op.SET_ALPHA: [slot.ramping for slot in slots.values()],
    }
    at_once = [False for _ in slots]
    speed = [[[ticks == 0 or slow for ticks in space.speed] for slow in slowly.get(op, at_once)] for op in ops]
    return Legal([possible[op] for op in ops], target, speed, ended)


def make_masks(n_envs: int, space: ActionSpace, growable: Tensor) -> Masks:
    """Storage, on the CPU, for the masks of `n_envs` environments; `growable` [K, blueprints] holds for all, always."""
    sizes = space.sizes
    slots = sizes["slot"]
    # At once there is no curve: the choice is the first, so that equal decisions are equal actions.
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
    """Share of each op among the decisions `op` [...] that were not forced."""
    counts = torch.bincount(op[~masks.forced], minlength=masks.slot.shape[-2]).tolist()
    return {Op(op).name: count / max(1, sum(counts)) for op, count in enumerate(counts)}
