"""Reward of one host's step as a function of its status before and after the action and after the epoch. K slots."""

from typing import NamedTuple

from esper_lightning.envs.config import EnvConfig
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.measured import Validation
from esper_lightning.growth.network import count_parameters
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.rewards import Account, Seed, SlotTick, Tick, pay


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
    chance: float
    """Loss of guessing, ln(classes)."""
    seeds: tuple[Seed, ...]
    """State of the seed in each slot, [K]; empty if rewards do not depend on it."""


class AfterAction(NamedTuple):
    """Status of a host right after an action, before it trains."""

    seeds: tuple[Seed, ...]
    accounts: tuple[Account, ...]
    growth: tuple[float, ...]
    """Ratio of the parameters of the seed in each slot to those of the host, [K]."""
    alpha: tuple[float, ...]


def status_of(env: HostEnv, with_seeds: bool) -> HostStatus:
    """Return the current status of a host, with its seeds if rewards depend on them (`RewardConfig.looks_at_seeds`)."""
    return HostStatus(
        ended=env.ended,
        at_horizon=env.tick >= env.horizon,
        objective=env.objective,
        validation=env.validated,
        accuracy_at_start=env.history.accuracy[0],
        chance=env.habitat.chance,
        seeds=tuple(as_seed(slot) for slot in env.slots) if with_seeds else (),
    )


def after_action(env: HostEnv) -> AfterAction:
    """Return the status of a host whose action has just been executed."""
    host = max(env.host_parameters, env.objective_config.smallest_host)
    return AfterAction(
        seeds=tuple(as_seed(slot) for slot in env.slots),
        accounts=tuple(env.accounts),
        growth=tuple(count_parameters(slot.seed) / host for slot in env.slots),
        alpha=tuple(slot.alpha_now if slot.blended else 0.0 for slot in env.slots),
    )


def as_seed(slot: SeedSlot) -> Seed:
    """Return the part of a slot's state that rewards depend on."""
    return Seed(slot.stage, slot.ticks_in_stage, slot.age, slot.fading)


def reward_terms(tick: Tick, config: EnvConfig) -> dict[str, float]:
    """Return the terms of one host's reward by name, rollback penalty included; their sum is the reward."""
    terms = pay(tick, config.reward)
    return terms | {"rollback": -config.governor.penalty * tick.diverged} if config.governor.enabled else terms


def as_tick(op: str, before: HostStatus, acted: AfterAction | None, after: HostStatus, diverged: bool) -> Tick:
    """Combine the statuses of one host within a step into the record that rewards are computed from.

    Args:
        op: Name of the executed op.
        before: Status before the action.
        acted: Status right after the action. None: rewards do not depend on seeds.
        after: Status after the epoch and its validation.
        diverged: True if the host was rolled back.
    """
    first, validation = before.validation, after.validation
    return Tick(
        op=op,
        over=before.ended,
        last=after.at_horizon,
        diverged=diverged,
        objective_before=before.objective,
        objective=after.objective,
        kept_objective_before=kept_objective(before.objective, first),
        kept_objective=after.objective if after.at_horizon else kept_objective(after.objective, validation),
        accuracy_at_start=after.accuracy_at_start,
        accuracy_before=first.all_seeds.accuracy,
        accuracy=validation.all_seeds.accuracy,
        kept_accuracy=validation.committed.accuracy,
        bare_before=bare(first),
        bare=bare(validation),
        loss_before=first.all_seeds.loss,
        loss=validation.all_seeds.loss,
        kept_loss=validation.committed.loss,
        chance=after.chance,
        slots=() if acted is None else slot_ticks(before, acted, after),
    )


def kept_objective(objective: float, validation: Validation) -> float:
    """Return J with fossilized seeds only, from J with live seeds; the charge is the same."""
    return objective - validation.all_seeds.accuracy + validation.committed.accuracy


def bare(validation: Validation) -> float:
    """Return the accuracy with every seed switched off, or with all seeds if that was not measured."""
    return (validation.all_seeds if validation.host_only is None else validation.host_only).accuracy


def slot_ticks(before: HostStatus, acted: AfterAction, after: HostStatus) -> tuple[SlotTick, ...]:
    """Combine the statuses of each slot within a step, [K]."""
    contributions = before.validation.contributions, after.validation.contributions
    rows = zip(before.seeds, acted.seeds, after.seeds, acted.accounts, *contributions, strict=True)
    sizes = zip(acted.growth, acted.alpha, strict=True)
    return tuple(SlotTick(*row, *size) for row, size in zip(rows, sizes, strict=True))
