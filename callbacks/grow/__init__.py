"""Growth of the network of a LightningModule of your own, while its own Trainer trains it."""

from esper_lightning.callbacks.grow.callback import Grow

__all__ = ["Grow"]
