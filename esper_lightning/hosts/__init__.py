"""What seeds grow on: networks with slots built in."""

from esper_lightning.hosts.cnn import CNN

__all__ = ["CNN"]
