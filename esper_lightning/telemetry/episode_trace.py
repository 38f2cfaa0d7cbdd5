"""Trace of one episode of every host: ops, stages, alphas and rollbacks by tick. T ticks, N hosts, K slots."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from esper_lightning.envs import StepResult
    from esper_lightning.envs.host_env import HostEnv


class EpisodeTrace:
    """Records one episode of every host for figures, in small arrays on the CPU.

    Args:
        ticks, n_envs, slots: T, N and K.
    """

    def __init__(self, ticks: int, n_envs: int, slots: int) -> None:
        self.length = 0
        self.op = torch.zeros(ticks, n_envs, dtype=torch.uint8)
        self.stage = torch.zeros(ticks, n_envs, slots, dtype=torch.uint8)  # after the tick
        self.alpha = torch.zeros(ticks, n_envs, slots)  # in the next tick
        self.rolled_back = torch.zeros(ticks, n_envs, dtype=torch.bool)
        self.seen = torch.zeros(ticks, dtype=torch.bool)  # False for ticks that were not recorded

    def update(self, step: "StepResult", envs: Sequence["HostEnv"]) -> None:
        """Record one environment step."""
        t = envs[0].tick - 1
        if t == 0:
            self.seen.zero_()
        self.seen[t] = True
        self.op[t] = step.ops
        self.stage[t] = torch.tensor([[int(slot.stage) for slot in env.slots] for env in envs])
        self.alpha[t] = torch.tensor([[slot.alpha_now if slot.blended else 0.0 for slot in env.slots] for env in envs])
        self.rolled_back[t] = False
        for word in step.verdicts:
            self.rolled_back[t, word.host] = word.verdict.diverged
        self.length = t + 1

    @property
    def is_complete(self) -> bool:
        """True if every tick of the episode so far was recorded."""
        return bool(self.seen[: self.length].all())

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name)[: self.length].clone() for name in PARTS}
        return {"length": self.length, **parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state within an episode; ignore a state with another number of hosts."""
        if state["op"].shape != (state["length"], self.op.shape[1]):
            return
        self.length = state["length"]
        for name in PARTS:
            getattr(self, name)[: self.length] = state[name]


PARTS = ("op", "stage", "alpha", "rolled_back", "seen")
