"""Fused executor: N hosts run as one network of batched layers."""

from esper_lightning.envs.executors.fused.executor import FusedExecutor

__all__ = ["FusedExecutor"]
