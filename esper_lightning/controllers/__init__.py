"""Controllers that choose the actions for a pool of hosts, and their registry: rules of this package, and your own."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from esper_lightning.controllers.rules import Heuristic, HillClimbing, Periodic, Scaling
from esper_lightning.runtime.checkpoint import NAMED_POLICIES
from esper_lightning.runtime.registry import Registry

CONTROLLERS: Registry[Callable[[], Any]] = Registry(
    "controller",
    {"climbing": HillClimbing, "heuristic": Heuristic, "periodic": Periodic, "scaling": Scaling},
    takes=callable,
    reserved=("random", "small static", "wait", "replayed", "yoked", "best fixed", *NAMED_POLICIES),
)
"""Functions or classes without required arguments that make a controller, by name."""

register = CONTROLLERS.register
"""Decorator, with a name, of a class or function without required arguments that makes a controller. The name may then
stand in `model.evaluation.against`, in `esper-lightning grow` and as the `decider` of `callbacks.Grow`."""


def make_controller(name: str) -> Any:
    """Return a new controller with a registered name or an import path.

    Raises ValueError if there is none, if it needs arguments, or if it lacks a method of a controller.
    """
    make = CONTROLLERS.find(name)
    try:
        signature(make).bind()
    except TypeError as error:
        raise ValueError(f"controller {name!r}: {error}; give every argument a default") from error
    made = make()
    check_methods(made, f"controller {name!r}")
    return made


def check_methods(controller: Any, what: str) -> None:
    """Raise ValueError, which begins with `what`, unless an object has the methods of a controller."""
    for method in ("reset", "act"):
        if not callable(getattr(controller, method, None)):
            raise ValueError(f"{what}: {type(controller).__name__} has no method {method!r}; give it one")
