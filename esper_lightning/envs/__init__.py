"""Host training as a vectorised environment: actions in, observations and rewards out."""

from esper_lightning.envs.actions import HEADS, Action, ActionConfig, ActionSpace, Masks, Op
from esper_lightning.envs.config import EnvConfig, HostFactory, check_host_count
from esper_lightning.envs.host_pool import HostPool, HostVerdict, HostVeto, PoolMetrics, StepResult
from esper_lightning.envs.multi_task import MixedPool
from esper_lightning.envs.vector_env import Observation

__all__ = [
    "HEADS",
    "Action",
    "ActionConfig",
    "ActionSpace",
    "EnvConfig",
    "HostFactory",
    "HostPool",
    "HostVerdict",
    "HostVeto",
    "Masks",
    "MixedPool",
    "Observation",
    "Op",
    "PoolMetrics",
    "StepResult",
    "check_host_count",
]
