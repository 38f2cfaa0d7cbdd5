"""Executors: interchangeable ways to train and validate N hosts."""

from collections.abc import Callable
from typing import TypeVar

from esper_lightning.envs.execution.fused import FusedExecutor
from esper_lightning.envs.execution.loop import LoopExecutor
from esper_lightning.envs.execution.streams import StreamsExecutor
from esper_lightning.envs.execution.threads import ThreadsExecutor
from esper_lightning.plugins import Registry

EXECUTORS: Registry[type[LoopExecutor]] = Registry(
    "executor",
    {"loop": LoopExecutor, "threads": ThreadsExecutor, "streams": StreamsExecutor, "fused": FusedExecutor},
    takes=lambda found: isinstance(found, type) and issubclass(found, LoopExecutor),
)
"""Executors by name."""

AUTO = "auto"
"""Name that stands for the fastest executor of this package."""

ExecutorClass = TypeVar("ExecutorClass", bound=type[LoopExecutor])


def register(name: str) -> Callable[[ExecutorClass], ExecutorClass]:
    """Return a decorator that registers a subclass of `LoopExecutor` as `name`, a value of `data.env.executor`.

    Raises ValueError if the name is taken.
    """

    def add(executor: ExecutorClass) -> ExecutorClass:
        EXECUTORS.add(name, executor, executor)
        return executor

    return add


def check_executor(name: str) -> None:
    """Raise ValueError, with a suggestion, if there is no executor with this name or import path."""
    if name != AUTO:
        EXECUTORS.find(name)


__all__ = [
    "AUTO",
    "EXECUTORS",
    "FusedExecutor",
    "LoopExecutor",
    "StreamsExecutor",
    "ThreadsExecutor",
    "check_executor",
    "register",
]
