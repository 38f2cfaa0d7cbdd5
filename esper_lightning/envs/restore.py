"""Checks of saved host states before they are loaded, since invalid numbers would fail much later or never."""

from typing import Any

from esper_lightning.envs.measurements import Score, Validation
from esper_lightning.envs.spaces.actions import Op
from esper_lightning.governor.judge import GovernorState
from esper_lightning.growth.gradient_stats import GradientStats
from esper_lightning.rewards import SeedAccount
from esper_lightning.serialization.checks import check_count, check_keys, check_numbers

HOST_KEYS = (
    "rng_seed",
    "tick",
    "last_op",
    "objective",
    "history",
    "validated",
    "host_gradient",
    "scaler",
    "skipped_steps",
)
MONITOR_KEYS = ("losses", "counts", "healthy_ticks", "alphas", "snapshot")
HISTORY_KEYS = ("train_loss", "train_accuracy", "loss", "accuracy")
SCALER_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def check_host(state: Any, horizon: int, slots: int) -> None:
    """Raise ValueError if a host of K = `slots` slots cannot have this state. Loading `growing` checks that part."""
    check_keys("a host", state, (*HOST_KEYS, "lr_factor", "growing"))
    check_count("a host's RNG seed", state["rng_seed"], 2**64 - 1)
    check_count("a host's tick", state["tick"], horizon)
    check_count("a host's last op", state["last_op"], len(Op) - 1)
    check_count("a host's skipped steps", state["skipped_steps"])
    check_numbers("a host's objective", [state["objective"]], finite=True)
    (factor,) = check_numbers("a host's factor of the learning rate", [state["lr_factor"]], finite=True)
    if not 0.0 < factor <= 1.0:
        raise ValueError(f"a host's factor of the learning rate is {factor}, outside of (0, 1]")
    history = check_keys("a host's history", state["history"], HISTORY_KEYS)
    if len(history) > len(HISTORY_KEYS):
        raise ValueError(f"a host's history holds more than {', '.join(HISTORY_KEYS)}")
    for name in HISTORY_KEYS:
        if len(check_numbers(f"a host's {name}", history[name])) > horizon + 1:
            raise ValueError(f"a host's {name} is of more than {horizon} ticks")
    if not history["loss"] or not history["accuracy"]:
        raise ValueError("a host has never been validated")
    check_validation(state["validated"], slots)
    if state["host_gradient"] is not None:
        check_numbers("a host's gradient", state["host_gradient"], len(GradientStats._fields))
    if state["scaler"]:
        scaler = check_keys("a host's loss scale", state["scaler"], SCALER_KEYS)
        check_numbers("a host's loss scale", [scaler[name] for name in SCALER_KEYS], finite=True)


def check_accounts(state: Any, max_ticks_left: int, slots: int) -> list[SeedAccount]:
    """Return the saved reward accounts of the host's slots, or new ones for an older checkpoint without accounts.

    An account is what the reward remembers of the seed in a slot: the host's accuracy at germination, the ticks left at
    fossilization, and the credit paid so far (see `SeedAccount`). Raises ValueError if the accounts are invalid.
    """
    if state is None:
        return [SeedAccount() for _ in range(slots)]
    if not isinstance(state, list) or len(state) != slots:
        raise ValueError(f"a host's accounts must be a list of {slots}, one for each slot")
    accounts = []
    for saved in state:
        accuracy_at_germination, ticks_left, credit = check_numbers("a host's account", saved, len(SeedAccount._fields))
        check_numbers("a host's account", [accuracy_at_germination, credit], finite=True)
        ticks_left = check_count("ticks that were left to a seed", ticks_left, max_ticks_left)
        accounts.append(SeedAccount(float(accuracy_at_germination), ticks_left, float(credit)))
    return accounts


def check_trials(state: Any, slots: int) -> list[dict[str, float]]:
    """Return the saved contributions of the blueprints tried in each slot, or none for an older checkpoint.

    Raises ValueError if they are invalid.
    """
    if state is None:
        return [{} for _ in range(slots)]
    if not isinstance(state, list) or len(state) != slots or not all(isinstance(trials, dict) for trials in state):
        raise ValueError(f"a host's trials must be a list of {slots}, with contributions by blueprint for each slot")
    names = [name for trials in state for name in trials]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("a host's trials are not named by blueprints")
    return [
        dict(zip(trials, map(float, check_numbers("a host's trial", list(trials.values()))), strict=True))
        for trials in state
    ]


def check_monitor(state: Any, horizon: int, slots: int) -> None:
    """Raise ValueError if this is no valid state of the Governor for a host of K = `slots` slots."""
    check_keys("the Governor's state", state, MONITOR_KEYS)
    check_numbers("the Governor's losses", state["losses"], finite=True)
    _, *initial_counts = GovernorState()
    counts = state["counts"]
    if not isinstance(counts, list) or [type(count) for count in counts] != [type(count) for count in initial_counts]:
        raise ValueError("the Governor's counts are of the wrong number or type")
    for count in counts:
        check_count("a count of the Governor", int(count))
    check_count("a count of the Governor", state["healthy_ticks"])
    if check_numbers("the Governor's alphas", state["alphas"], finite=True) and len(state["alphas"]) != slots:
        raise ValueError(f"the Governor's state has {len(state['alphas'])} alphas, the host has {slots} slots")
    check_host(state["snapshot"], horizon, slots)


def validation_state(validation: Validation) -> dict[str, Any]:
    """Convert a validation to the form in checkpoints: lists of loss and accuracy by name."""
    scores = {"all_seeds": validation.all_seeds, "fossilized": validation.fossilized, "host_only": validation.host_only}
    named = {name: None if score is None else list(score) for name, score in scores.items()}
    return named | {
        "without": [list(score) for score in validation.without],
        "trials": [list(score) for score in validation.trials],
    }


def check_validation(state: Any, slots: int) -> Validation | None:
    """Return the saved validation of a host of K = `slots` slots, or None if there is none.

    Raises ValueError if it is invalid.
    """
    if state is None:
        return None
    what = "a host's validation"
    check_keys(what, state, Validation._fields)
    for name in ("without", "trials"):
        if not isinstance(state[name], list) or len(state[name]) != slots:
            raise ValueError(f"{what} lacks a score {name!r} for each of {slots} slots")

    def score(saved: Any) -> Score:
        return Score(*check_numbers(what, saved, len(Score._fields)))

    host_only = None if state["host_only"] is None else score(state["host_only"])
    without, trials = ([score(saved) for saved in state[name]] for name in ("without", "trials"))
    return Validation(score(state["all_seeds"]), without, score(state["fossilized"]), trials, host_only)
