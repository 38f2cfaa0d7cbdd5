"""How N hosts train and validate."""

from esper_lightning.envs.execution.loop import LoopExecutor
from esper_lightning.envs.execution.timing import PHASES, Phase, PhaseClock

__all__ = ["PHASES", "LoopExecutor", "Phase", "PhaseClock"]
