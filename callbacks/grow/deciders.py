"""Deciders of growth: rules by name, schedules and trained policies from files, or objects of your own."""

from typing import Any, Protocol

from esper_lightning import load_controller
from esper_lightning.checkpointing.policy_file import CHECKPOINT_SUFFIX, names_policy
from esper_lightning.controllers.fixed_schedule import FixedSchedule
from esper_lightning.controllers.registry import CONTROLLERS, check_methods, make_controller
from esper_lightning.controllers.schedule import read_schedule
from esper_lightning.envs.single_pool import SinglePool
from esper_lightning.envs.spaces.actions import Action

SCHEDULE_SUFFIX = ".json"


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
        check_methods(decider, "Grow: decider")
        return decider
    if decider.endswith(SCHEDULE_SUFFIX):
        return FixedSchedule(read_schedule(decider))
    if names_policy(decider):
        return load_controller(decider)
    try:
        CONTROLLERS.find(decider)
    except ValueError as error:
        raise ValueError(
            f"Grow: {error}; a decider may also be a schedule ({SCHEDULE_SUFFIX}) or a checkpoint of a policy "
            f"({CHECKPOINT_SUFFIX})"
        ) from error
    return make_controller(decider)


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
