"""Controllers that any other must beat."""

import torch

from esper_lightning.envs import HEADS, Action, HostPool, Op
from esper_lightning.envs.actions import blank_irrelevant, relevance


class WaitOnly:
    """Never grows anything: the host as it is."""

    def reset(self, pool: HostPool) -> None:
        pass

    def act(self, pool: HostPool) -> Action:
        return Action(*(torch.full((pool.n_envs,), int(Op.WAIT), device=pool.device) for _ in HEADS))


class RandomValid:
    """Draws uniformly: an op among the possible ones, then a slot possible for it, a blueprint, a tempo.

    Args:
        seed: Of its own random numbers; every episode continues the stream.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self, pool: HostPool) -> None:
        pass

    def act(self, pool: HostPool) -> Action:
        rows = torch.arange(pool.n_envs)
        masks = type(pool.masks)(*(mask.cpu() for mask in pool.masks))
        op = self._draw(masks.op)
        slot = self._draw(masks.slot[rows, op])
        blueprint = self._draw(masks.blueprint[rows, slot])
        tempo = self._draw(torch.ones(pool.n_envs, len(pool.space.tempos), dtype=torch.bool))
        action = blank_irrelevant(Action(op, slot, blueprint, tempo), relevance())
        return Action(*(head.to(pool.device) for head in action))

    def _draw(self, possible: torch.Tensor) -> torch.Tensor:  # [N, choices] bool -> [N]
        return torch.multinomial(possible.float(), 1, generator=self.generator).squeeze(1)
