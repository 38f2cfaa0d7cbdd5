"""Choices for the tests of executor auto, and a replacement for measuring speeds."""

from collections.abc import Callable

import torch
from rich.console import Console

from esper_lightning.envs import HostPool
from esper_lightning.envs.execution import FusedExecutor, LoopExecutor, ThreadsExecutor
from esper_lightning.envs.execution.autotune import ExecutorChoice

MakePool = Callable[..., HostPool]
CPU = torch.device("cpu")
LOOP, PLAIN_LOOP, THREADS, PLAIN_THREADS = (
    ExecutorChoice(name, on) for name in ("loop", "threads") for on in (True, False)
)


class FixedSpeeds:
    """Replaces `measure_speed`: returns given speeds and records the calls.

    A speed is that of an executor, of `plain_` and an executor without oneDNN, or of a method of convolutions, which
    stands for executor fused.
    """

    def __init__(self, **speeds: float) -> None:
        self.speeds = speeds
        self.calls: list[str] = []

    def __call__(self, executor: LoopExecutor, *_: object) -> float:
        types = {LoopExecutor: "loop", ThreadsExecutor: "threads", FusedExecutor: "fused"}
        name = executor.training.convolutions or types[type(executor)]
        self.calls.append(name if executor.training.onednn else f"plain_{name}")
        return self.speeds.get(self.calls[-1], 1.0)


def printed_report(pool: HostPool) -> str:
    """Return the printed report of a pool's selection."""
    console = Console(width=200)
    with console.capture() as captured:
        for part in pool.selection.report():
            console.print(part)
    return captured.get()
