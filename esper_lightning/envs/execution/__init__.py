"""Executors: interchangeable ways to train and validate N hosts."""

from esper_lightning.envs.execution.fused import FusedExecutor
from esper_lightning.envs.execution.loop import LoopExecutor
from esper_lightning.envs.execution.streams import StreamsExecutor, other_devices
from esper_lightning.envs.execution.threads import ThreadsExecutor
from esper_lightning.envs.execution.timing import PHASES, Laps, Phase, PhaseClock, make_timer

EXECUTORS: dict[str, type[LoopExecutor]] = {
    "loop": LoopExecutor,
    "threads": ThreadsExecutor,
    "streams": StreamsExecutor,
    "fused": FusedExecutor,
}

ONLY_ON: dict[str, str] = {"threads": "cpu", "streams": "cuda"}
"""Device type required by each executor that supports only one."""

COMPILED = frozenset({"loop", "streams"})
"""Executors that support compiled hosts.

Threads are excluded because torch may compile at any call, and no other thread may run a network meanwhile; fused is
excluded because it uses kernels of its own."""

__all__ = [
    "COMPILED",
    "EXECUTORS",
    "ONLY_ON",
    "PHASES",
    "FusedExecutor",
    "Laps",
    "LoopExecutor",
    "Phase",
    "PhaseClock",
    "StreamsExecutor",
    "ThreadsExecutor",
    "make_timer",
    "other_devices",
]
