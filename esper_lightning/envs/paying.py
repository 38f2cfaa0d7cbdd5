"""Records of a host before, within and after a step, and the reward as a function of them. K slots."""

from typing import NamedTuple

from esper_lightning.envs.config import EnvConfig
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.measured import Validation
from esper_lightning.growth.network import count_parameters
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.rewards import Account, Seed, SlotTick, Tick, pay


class HostStatus(NamedTuple):
    """A host between two steps, as rewards see it. Nothing of the record is changed by what follows."""

    ended: bool
    """The episode was over before the horizon."""
    at_horizon: bool
    objective: float
    validation: Validation
    """The last one."""
    accuracy_at_start: float
    """Accuracy before the first step of the episode."""
    chance: float
    """Loss of guessing, ln(classes)."""
    seeds: tuple[Seed, ...]
    """What is in each slot, [K]; empty where rewards do not depend on it."""


class AfterAction(NamedTuple):
    """A host right after an action, before it trains."""

    seeds: tuple[Seed, ...]
    accounts: tuple[Account, ...]
    growth: tuple[float, ...]
    """Parameters of the seed in each slot over those of the host, [K]."""
    alpha: tuple[float, ...]


def status_of(env: HostEnv, with_seeds: bool) -> HostStatus:
    """The host as it is now, its seeds too where rewards depend on them (`RewardConfig.looks_at_seeds`)."""
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
    """The host as it is now, where an action has just been carried out."""
    host = max(env.host_parameters, env.objective_config.smallest_host)
    return AfterAction(
        seeds=tuple(as_seed(slot) for slot in env.slots),
        accounts=tuple(env.accounts),
        growth=tuple(count_parameters(slot.seed) / host for slot in env.slots),
        alpha=tuple(slot.alpha_now if slot.blended else 0.0 for slot in env.slots),
    )


def as_seed(slot: SeedSlot) -> Seed:
    """The part of a slot's state that rewards depend on."""
    return Seed(slot.stage, slot.ticks_in_stage, slot.age, slot.fading)


def reward_terms(tick: Tick, config: EnvConfig) -> dict[str, float]:
    """The terms that the reward of one host's step is the sum of, by name, and what a rollback costs."""
    terms = pay(tick, config.reward)
    return terms | {"rollback": -config.governor.penalty * tick.diverged} if config.governor.enabled else terms


def as_tick(op: str, before: HostStatus, acted: AfterAction | None, after: HostStatus, diverged: bool) -> Tick:
    """One host's step as rewards see it.

    Args:
        op: Name of the op that was carried out.
        before, after: The host before the action, and after the epoch and its validation.
        acted: The host right after the action. None: rewards do not depend on seeds.
        diverged: The host was rolled back.
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
    """J with the fossilized seeds alone, from J with live seeds: rent is the same."""
    return objective - validation.all_seeds.accuracy + validation.committed.accuracy


def bare(validation: Validation) -> float:
    """Accuracy with every seed switched off; with all of them where that was not asked for."""
    return (validation.all_seeds if validation.host_only is None else validation.host_only).accuracy


def slot_ticks(before: HostStatus, acted: AfterAction, after: HostStatus) -> tuple[SlotTick, ...]:
    """What happened in each slot, [K]."""
    contributions = before.validation.contributions, after.validation.contributions
    rows = zip(before.seeds, acted.seeds, after.seeds, acted.accounts, *contributions, strict=True)
    sizes = zip(acted.growth, acted.alpha, strict=True)
    return tuple(SlotTick(*row, *size) for row, size in zip(rows, sizes, strict=True))
