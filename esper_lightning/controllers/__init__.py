"""Controllers that choose the actions for a pool of hosts."""

from esper_lightning.controllers.registry import CONTROLLERS, make_controller, register

__all__ = ["CONTROLLERS", "make_controller", "register"]
