"""Executors: interchangeable ways to train and validate N hosts."""

from esper_lightning.envs.execution.fused import FusedExecutor
from esper_lightning.envs.execution.loop import LoopExecutor
from esper_lightning.envs.execution.streams import StreamsExecutor, other_devices
from esper_lightning.envs.execution.threads import ThreadsExecutor

EXECUTORS: dict[str, type[LoopExecutor]] = {
    "loop": LoopExecutor,
    "threads": ThreadsExecutor,
    "streams": StreamsExecutor,
    "fused": FusedExecutor,
}


__all__ = [
    "EXECUTORS",
    "FusedExecutor",
    "LoopExecutor",
    "StreamsExecutor",
    "ThreadsExecutor",
    "other_devices",
]
