"""Which executors there are to choose from, and which of them is used by a run that goes on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from esper_lightning.envs.execution import COMPILED, EXECUTORS, ONLY_ON, LoopExecutor
from esper_lightning.envs.training import HostTraining
from esper_lightning.tasks import Task

HOST_BY_HOST = frozenset({"loop", "threads", "streams"})
"""Executors that compute every host by itself and in the same operations: with the same kernels results are equal."""


class Choice(NamedTuple):
    """How hosts are executed."""

    executor: str
    onednn: bool

    def __str__(self) -> str:
        return self.executor if self.onednn else f"{self.executor} without oneDNN"

    def equals(self, other: "Choice") -> bool:
        """Do both give the same results bit for bit, and not just within a tolerance?"""
        alike = self.executor == other.executor or {self.executor, other.executor} <= HOST_BY_HOST
        return alike and self.onednn == other.onednn

    def make(self, task: Task, training: HostTraining) -> LoopExecutor:
        """Such an executor. Raises ValueError if it cannot train so."""
        return EXECUTORS[self.executor](task, replace(training, onednn=self.onednn))


def candidates(device: torch.device, training: HostTraining) -> list[Choice]:
    """What there is to choose from; the first is the reference."""
    free = {"cpu": [True, False]}.get(device.type, [True])  # elsewhere oneDNN has nothing to do
    switch = free if training.onednn is None else [training.onednn]
    names = [name for name in EXECUTORS if training.compile is None or name in COMPILED]
    return [Choice(name, on) for name in names if ONLY_ON.get(name) in (None, device.type) for on in switch]


def go_on(saved: Choice, chosen: Choice, possible: Sequence[Choice]) -> tuple[Choice, str | None]:
    """How a run goes on that was executed as `saved`, and what there is to say of it.

    Args:
        saved: Of the run so far.
        chosen: What would be used without it.
        possible: What may be used instead.
    """
    if saved == chosen:
        return chosen, None
    if saved in possible:
        return saved, f"executor {saved}, as the run so far, not {chosen}: so it goes on as if it had not been stopped"
    if saved.equals(chosen):
        return chosen, None
    return chosen, f"executor {chosen}, the run so far had {saved}: it goes on within their tolerance, not bit for bit"
