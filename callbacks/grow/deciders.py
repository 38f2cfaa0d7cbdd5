"""Deciders of growth: rules by name, schedules and trained policies from files, or objects of your own."""

from typing import Any, Protocol

from esper_lightning import load_controller
from esper_lightning.checkpointing.policy_file import CHECKPOINT_SUFFIX, POLICY_SUFFIX, names_policy
from esper_lightning.controllers.random import WaitOnly
from esper_lightning.controllers.registry import CONTROLLERS, check_methods, make_controller
from esper_lightning.controllers.schedules import FixedSchedule, read_schedule
from esper_lightning.envs.single_pool import SinglePool
from esper_lightning.envs.spaces.actions import Action


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
    if decider == "wait":
        return WaitOnly()
    if decider.endswith(".json"):
        return FixedSchedule(read_schedule(decider))
    if names_policy(decider):
        return load_controller(decider)
    try:
        CONTROLLERS.find(decider)
    except ValueError as error:
        raise ValueError(
            f"Grow: {error}; a decider may also be a schedule (.json), a policy ({CHECKPOINT_SUFFIX} or "
            f"{POLICY_SUFFIX}), tamiyo, or wait"
        ) from error
    return make_controller(decider)


def resume_decider(decider: Any, name: str, pool: SinglePool, *, saved: dict[str, Any]) -> None:
    """Let a decider continue from its class, name and state in a checkpoint. Raises ValueError if it cannot."""
    if saved["class"] != type(decider).__name__:
        raise ValueError(
            f"Grow: the checkpoint is of decider: {saved['name']}, the run of decider: {name}; give the same"
        )
    if saved["state"] is None:
        raise ValueError(f"Grow: {name} cannot continue a run; give it state_dict and load_state_dict(pool, state)")
    try:
        decider.load_state_dict(pool, saved["state"])
    except ValueError as error:
        raise ValueError(f"Grow: {name} cannot continue the run of {saved['name']}: {error}") from error
