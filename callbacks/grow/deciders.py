"""Deciders of growth: rules by name, schedules and trained policies from files, or objects of your own."""

from typing import Any, Protocol

from esper_lightning import load_controller
from esper_lightning.blueprints import suggest_name
from esper_lightning.controllers.fixed_schedule import FixedSchedule
from esper_lightning.controllers.heuristic import Heuristic
from esper_lightning.controllers.hill_climbing import HillClimbing
from esper_lightning.controllers.periodic import Periodic
from esper_lightning.controllers.schedule import read_schedule
from esper_lightning.envs.single_pool import SinglePool
from esper_lightning.envs.spaces.actions import Action

RULES = {"climbing": HillClimbing, "heuristic": Heuristic, "periodic": Periodic}
"""Rules by name, with their default settings."""

SCHEDULE_SUFFIX, POLICY_SUFFIX = ".json", ".ckpt"


class Decider(Protocol):
    """Chooses what grows, once per tick. If it has `state_dict` and `load_state_dict(pool, state)`, runs can resume."""

    def reset(self, pool: SinglePool) -> None:
        """Begin a training."""

    def act(self, pool: SinglePool) -> Action:
        """Return an action that is possible according to `pool.masks`."""
        ...


def make_decider(decider: str | Decider) -> Decider:
    """Return the decider of a name or a file; an object is returned as it is.

    Raises ValueError if the name is unknown, or the file missing or damaged.
    """
    if not isinstance(decider, str):
        for method in ("reset", "act"):
            if not callable(getattr(decider, method, None)):
                raise ValueError(f"Grow: decider {type(decider).__name__} has no method {method!r}; give it one")
        return decider
    if decider in RULES:
        return RULES[decider]()
    if decider.endswith(SCHEDULE_SUFFIX):
        return FixedSchedule(read_schedule(decider))
    if decider.endswith(POLICY_SUFFIX):
        return load_controller(decider)
    names = suggest_name(decider, list(RULES))
    raise ValueError(
        f"Grow: unknown decider {decider!r}; {names}, or name a schedule ({SCHEDULE_SUFFIX}) or a checkpoint of a "
        f"policy ({POLICY_SUFFIX})"
    )


def decider_state(decider: Decider) -> dict[str, Any]:
    """Return the kind of a decider, and its state: None if it has none."""
    state_dict = getattr(decider, "state_dict", None)
    return {"kind": type(decider).__name__, "state": None if state_dict is None else state_dict()}


def resume_decider(decider: Decider, pool: SinglePool, saved: dict[str, Any]) -> None:
    """Let a decider continue from what `decider_state` returned. Raises ValueError if it cannot."""
    kind = type(decider).__name__
    if saved["kind"] != kind:
        raise ValueError(f"Grow: {saved['kind']} decided in the checkpoint, and now {kind}; give the same decider")
    if saved["state"] is None:
        raise ValueError(f"Grow: {kind} cannot continue a run; give it state_dict and load_state_dict(pool, state)")
    load_state_dict: Any = getattr(decider, "load_state_dict")  # noqa: B009 not every decider has it
    load_state_dict(pool, saved["state"])
