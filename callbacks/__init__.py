"""Lightning callbacks, one task each: they decide when something happens, and call the package to do it."""

from esper_lightning.callbacks.evaluation import Evaluation
from esper_lightning.callbacks.governor import Governor
from esper_lightning.callbacks.grow import Grow
from esper_lightning.callbacks.preemption import Preemption
from esper_lightning.callbacks.progress import ProgressReport
from esper_lightning.callbacks.rollout_state import RolloutState
from esper_lightning.callbacks.stack import Stack
from esper_lightning.callbacks.telemetry import Telemetry

__all__ = ["Evaluation", "Governor", "Grow", "Preemption", "ProgressReport", "RolloutState", "Stack", "Telemetry"]
