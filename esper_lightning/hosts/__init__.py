"""Hosts: networks with slots in which seeds grow."""

from esper_lightning.hosts.attached import Attached
from esper_lightning.hosts.cnn import CNN
from esper_lightning.hosts.parts import MLP
from esper_lightning.hosts.transformer import GPT

__all__ = ["CNN", "GPT", "MLP", "Attached"]
