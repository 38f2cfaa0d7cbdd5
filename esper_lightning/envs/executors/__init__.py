"""Executors: interchangeable ways to train and validate N hosts."""

from esper_lightning.envs.executors.fused.executor import FusedExecutor
from esper_lightning.envs.executors.loop import LoopExecutor
from esper_lightning.envs.executors.parallel import StreamsExecutor, ThreadsExecutor
from esper_lightning.runtime.registry import Registry

AUTO = "auto"
"""Name that stands for the executor of this package that fits hosts and device."""

EXECUTORS: Registry[type[LoopExecutor]] = Registry(
    "executor",
    {"loop": LoopExecutor, "threads": ThreadsExecutor, "streams": StreamsExecutor, "fused": FusedExecutor},
    takes=lambda found: isinstance(found, type) and issubclass(found, LoopExecutor),
    reserved=(AUTO,),
)
"""Executors by name."""

register = EXECUTORS.register
"""Decorator, with a name, of a subclass of `LoopExecutor`. The name may then be the value of `data.env.executor`."""

__all__ = ["AUTO", "EXECUTORS", "FusedExecutor", "LoopExecutor", "StreamsExecutor", "ThreadsExecutor", "register"]
