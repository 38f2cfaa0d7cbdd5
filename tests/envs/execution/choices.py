"""What the tests of executor auto choose from, and what takes the place of measuring."""

from collections.abc import Callable

import torch
from rich.console import Console

from esper_lightning.envs import HostPool
from esper_lightning.envs.execution import LoopExecutor, ThreadsExecutor
from esper_lightning.envs.execution.choice import Choice

MakePool = Callable[..., HostPool]
CPU = torch.device("cpu")
LOOP, PLAIN_LOOP, THREADS, PLAIN_THREADS = (Choice(name, on) for name in ("loop", "threads") for on in (True, False))


class Stopwatch:
    """Takes the place of measuring: says what it is told, and counts how often it is asked."""

    def __init__(self, **speeds: float) -> None:
        self.speeds = speeds
        self.asked: list[str] = []

    def __call__(self, executor: LoopExecutor, *_: object) -> float:
        name = {LoopExecutor: "loop", ThreadsExecutor: "threads"}[type(executor)]
        self.asked.append(name if executor.training.onednn else f"plain_{name}")
        return self.speeds.get(self.asked[-1], 1.0)


def said(pool: HostPool) -> str:
    """What is printed of a selection."""
    console = Console(width=200)
    with console.capture() as captured:
        for part in pool.selection.report():
            console.print(part)
    return captured.get()
