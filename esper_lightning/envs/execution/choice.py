"""Candidate executors for a device, and the executor of a resumed run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from esper_lightning.envs.execution import COMPILED, EXECUTORS, ONLY_ON, LoopExecutor
from esper_lightning.envs.training import HostTraining
from esper_lightning.tasks import Task

HOST_BY_HOST = frozenset({"loop", "threads", "streams"})
"""Executors that compute each host separately by the same operations: with the same kernels their results are equal."""


class Choice(NamedTuple):
    """Executor and its use of oneDNN."""

    executor: str
    onednn: bool

    def __str__(self) -> str:
        return self.executor if self.onednn else f"{self.executor} without oneDNN"

    def equals(self, other: "Choice") -> bool:
        """Return whether both choices give the same results bit for bit, and not only within a tolerance."""
        alike = self.executor == other.executor or {self.executor, other.executor} <= HOST_BY_HOST
        return alike and self.onednn == other.onednn

    def make(self, task: Task, training: HostTraining) -> LoopExecutor:
        """Create the executor. Raises ValueError if it does not support the training settings."""
        return EXECUTORS[self.executor](task, replace(training, onednn=self.onednn))


def candidates(device: torch.device, training: HostTraining) -> list[Choice]:
    """Return the choices that a device and the training settings allow; the first is the reference."""
    free = {"cpu": [True, False]}.get(device.type, [True])  # oneDNN only affects the CPU
    switch = free if training.onednn is None else [training.onednn]
    names = [name for name in EXECUTORS if training.compile is None or name in COMPILED]
    return [Choice(name, on) for name in names if ONLY_ON.get(name) in (None, device.type) for on in switch]


def go_on(saved: Choice, chosen: Choice, possible: Sequence[Choice]) -> tuple[Choice, str | None]:
    """Return the choice with which a resumed run continues, and a message if the choice needs one.

    Args:
        saved: The choice of the run so far.
        chosen: The choice that a new run would use.
        available: The choices that this machine and these settings allow.
    """
    if saved == chosen:
        return chosen, None
    if saved in possible:
        return saved, f"executor {saved}, as the run so far, not {chosen}: so it goes on as if it had not been stopped"
    if saved.equals(chosen):
        return chosen, None
    return chosen, f"executor {chosen}, the run so far had {saved}: it goes on within their tolerance, not bit for bit"
