"""When things happen in a run: thin Lightning hooks, one job each."""

from callbacks.evaluation import Evaluation
from callbacks.governor import Governor
from callbacks.preemption import Preemption
from callbacks.progress import ProgressReport
from callbacks.rollout_state import RolloutState
from callbacks.telemetry import Telemetry

__all__ = ["Evaluation", "Governor", "Preemption", "ProgressReport", "RolloutState", "Telemetry"]
