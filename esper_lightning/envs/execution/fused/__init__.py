"""N hosts as one network."""

from esper_lightning.envs.execution.fused.executor import FusedExecutor

__all__ = ["FusedExecutor"]
