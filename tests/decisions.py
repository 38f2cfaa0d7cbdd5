"""Actions for tests: a tuple with the index of a choice per head, for each environment."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from esper_lightning.envs import HEADS, Action, HostPool, Op
from esper_lightning.envs.actions import to_action

CPU = torch.device("cpu")

Row = tuple[int, ...]


def decide(op: Op, **choices: int) -> Row:
    """Return an action with 0 for every head that is not named."""
    return tuple(int(op) if head == "op" else choices.pop(head, 0) for head in HEADS)


WAIT = decide(Op.WAIT)


def germinate(slot: int, blueprint: int = 0, tempo: int = 0) -> Row:
    return decide(Op.GERMINATE, slot=slot, blueprint=blueprint, tempo=tempo)


def cull(slot: int) -> Row:
    return decide(Op.CULL, slot=slot)


def fossilize(slot: int) -> Row:
    return decide(Op.FOSSILIZE, slot=slot)


def episode(pool: HostPool, controller: Any) -> Tensor:
    """Play an episode and return its actions [T, heads, N]; the pool raises if one is masked."""
    pool.reset(range(1, 1 + pool.n_envs))
    controller.reset(pool)
    taken = []
    for _ in range(pool.config.horizon):
        action = controller.act(pool)
        taken.append(torch.stack(action))
        pool.step(action)
    return torch.stack(taken)


def act(*rows: Sequence[int]) -> Action:
    """Return actions in the form that a pool takes, one row per environment."""
    return to_action(rows, CPU)
