"""Lightning data modules, which own the environments."""

from esper_lightning.datamodules.gymnasium import VectorData
from esper_lightning.datamodules.hosts import HostPoolData, TaskConfig

__all__ = ["HostPoolData", "TaskConfig", "VectorData"]
