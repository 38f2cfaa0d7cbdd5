"""Reward of one host's step as a function of its status before and after the action and after the epoch. K slots."""

from typing import NamedTuple

from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.measurements import Validation
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.rewards import (
    ROLLBACK_TERM,
    HostStep,
    RewardConfig,
    SeedAccount,
    SlotStatus,
    SlotStep,
    compute_terms,
)


class HostStatus(NamedTuple):
    """Status of a host between two steps, as far as rewards depend on it. An immutable copy."""

    ended: bool
    """True if the episode ended before the horizon."""
    at_horizon: bool
    objective: float
    validation: Validation
    """Most recent validation."""
    accuracy_at_start: float
    """Accuracy before the first step of the episode."""
    chance_loss: float
    """Loss of guessing, ln(classes)."""
    seeds: tuple[SlotStatus, ...]
    """State of the seed in each slot, [K]; empty if rewards do not depend on it."""


class AfterAction(NamedTuple):
    """Status of a host right after an action, before it trains."""

    seeds: tuple[SlotStatus, ...]
    accounts: tuple[SeedAccount, ...]
    growth: tuple[float, ...]
    """Ratio of the parameters of the seed in each slot to those of the host, [K]."""
    alpha: tuple[float, ...]
    parameters: tuple[int, ...]


def host_status(env: HostEnv, with_seeds: bool) -> HostStatus:
    """Return the current status of a host, with its seeds if rewards depend on them (`RewardConfig.looks_at_seeds`)."""
    assert env.validated is not None, "an episode begins with a validation"
    return HostStatus(
        ended=env.ended,
        at_horizon=env.tick >= env.horizon,
        objective=env.objective,
        validation=env.validated,
        accuracy_at_start=env.history.accuracy[0],
        chance_loss=env.context.chance_loss,
        seeds=tuple(seed_state(slot) for slot in env.slots) if with_seeds else (),
    )


def status_after_action(env: HostEnv) -> AfterAction:
    """Return the status of a host whose action has just been executed."""
    host = max(env.host_parameters, env.objective_config.smallest_host)
    parameters = tuple(count_parameters(slot.seed) for slot in env.slots)
    return AfterAction(
        seeds=tuple(seed_state(slot) for slot in env.slots),
        accounts=tuple(env.accounts),
        growth=tuple(number / host for number in parameters),
        alpha=tuple(slot.alpha_now if slot.blended else 0.0 for slot in env.slots),
        parameters=parameters,
    )


def seed_state(slot: SeedSlot) -> SlotStatus:
    """Return the part of a slot's state that rewards depend on."""
    return SlotStatus(slot.stage, slot.ticks_in_stage, slot.age)


def reward_terms(tick: HostStep, config: RewardConfig, penalty: float | None) -> dict[str, float]:
    """Return the terms of one host's reward by name; their sum is the reward.

    Args:
        tick: The step of the host.
        config: Mode of the reward, and weights of its terms.
        penalty: Penalty of a rollback. None: the host is not watched, and the term is left out.
    """
    terms = compute_terms(tick, config)
    return terms if penalty is None else terms | {ROLLBACK_TERM: -penalty * tick.diverged}


def make_step_record(
    op: str, *, before: HostStatus, after_action: AfterAction | None, after: HostStatus, diverged: bool
) -> HostStep:
    """Combine the statuses of one host within a step into the record that rewards are computed from.

    Args:
        op: Name of the executed op.
        before: Status before the action.
        after_action: Status right after the action. None: rewards do not depend on seeds.
        after: Status after the epoch and its validation.
        diverged: True if the host was rolled back.
    """
    first_validation, validation = before.validation, after.validation
    return HostStep(
        op=op,
        already_ended=before.ended,
        at_horizon=after.at_horizon,
        diverged=diverged,
        objective_before=before.objective,
        objective=after.objective,
        fossilized_objective_before=fossilized_objective(before.objective, first_validation),
        fossilized_objective=after.objective if after.at_horizon else fossilized_objective(after.objective, validation),
        accuracy_at_start=after.accuracy_at_start,
        accuracy_before=first_validation.all_seeds.accuracy,
        accuracy=validation.all_seeds.accuracy,
        fossilized_accuracy=validation.fossilized.accuracy,
        host_only_accuracy_before=host_only_accuracy(first_validation),
        host_only_accuracy=host_only_accuracy(validation),
        loss_before=first_validation.all_seeds.loss,
        loss=validation.all_seeds.loss,
        fossilized_loss=validation.fossilized.loss,
        chance_loss=after.chance_loss,
        slots=() if after_action is None else slot_records(before, after_action, after),
    )


def fossilized_objective(objective: float, validation: Validation) -> float:
    """Return J with fossilized seeds only, from J with live seeds; the charge is the same."""
    return objective - validation.all_seeds.accuracy + validation.fossilized.accuracy


def host_only_accuracy(validation: Validation) -> float:
    """Return the accuracy with every seed switched off, or with all seeds if that was not measured."""
    return (validation.all_seeds if validation.host_only is None else validation.host_only).accuracy


def slot_records(before: HostStatus, after_action: AfterAction, after: HostStatus) -> tuple[SlotStep, ...]:
    """Return one record per slot, [K]: its seed before the action, right after it, and at the end of the step."""
    contributions = before.validation.contributions, after.validation.contributions
    rows = zip(before.seeds, after_action.seeds, after.seeds, after_action.accounts, *contributions, strict=True)
    sizes = zip(after_action.growth, after_action.alpha, after_action.parameters, strict=True)
    return tuple(SlotStep._make((*row, *size)) for row, size in zip(rows, sizes, strict=True))
