"""How N hosts train and validate."""

from esper_lightning.envs.execution.loop import LoopExecutor
from esper_lightning.envs.execution.threads import ThreadsExecutor
from esper_lightning.envs.execution.timing import PHASES, Phase, PhaseClock

EXECUTORS: dict[str, type[LoopExecutor]] = {"loop": LoopExecutor, "threads": ThreadsExecutor}

__all__ = ["EXECUTORS", "PHASES", "LoopExecutor", "Phase", "PhaseClock", "ThreadsExecutor"]
