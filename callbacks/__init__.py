"""Lightning callbacks, one task each: they decide when something happens, and call the package to do it."""

from callbacks.evaluation import Evaluation
from callbacks.governor import Governor
from callbacks.grow import Grow
from callbacks.preemption import Preemption
from callbacks.progress import ProgressReport
from callbacks.rollout_state import RolloutState
from callbacks.telemetry import Telemetry

__all__ = ["Evaluation", "Governor", "Grow", "Preemption", "ProgressReport", "RolloutState", "Telemetry"]
