"""Grows neural networks while they train, under a learned policy."""

from esper_lightning.data import HostPoolData
from esper_lightning.module import TamiyoModule

__all__ = ["HostPoolData", "TamiyoModule"]
