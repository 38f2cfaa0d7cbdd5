"""What ticks are worth to the controller: collects what rewards ask for, before and after, and settles accounts."""

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs.actions import Op
from esper_lightning.envs.config import EnvConfig
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.measured import Validation
from esper_lightning.growth.network import count_parameters
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.rewards import (
    Account,
    Seed,
    SlotTick,
    Tick,
    compute_rent,
    objective,
    pay,
    settled,
)


class Moment(NamedTuple):
    """A host before a decision. Nothing of it is changed by what follows."""

    ended: bool
    objective: float
    validation: Validation  # the last one
    seeds: list[Seed]


class Acted(NamedTuple):
    """A host after a decision, before it trains."""

    seeds: list[Seed]
    accounts: list[Account]
    growth: list[float]  # per slot, relative to the host
    alpha: list[float]


class Payroll:
    """Pays N environments, tick by tick: call `begin`, `decided` and `pay` in this order.

    Args:
        envs: The environments.
        config: What they are paid for.
    """

    def __init__(self, envs: Sequence[HostEnv], config: EnvConfig) -> None:
        self.envs = envs
        self.config = config
        self.looks_at_seeds = config.reward.looks_at_seeds

    def begin(self) -> None:
        """A tick begins: nothing has been done yet."""
        self.before = [moment(env) if self.looks_at_seeds else moment_without_seeds(env) for env in self.envs]

    def decided(self, decisions: Sequence[Sequence[int]]) -> None:
        """These decisions were carried out, and no host has trained yet."""
        smallest = self.config.objective.smallest_host
        self.ops = [Op(decision[0]).name for decision in decisions]
        self.acted = [acted(env, smallest) if self.looks_at_seeds else None for env in self.envs]

    def pay(self, diverged: Set[int], worth: Sequence[float]) -> dict[str, Tensor]:
        """The terms of the reward [N] in float64, on the CPU, and what a rollback costs.

        Args:
            diverged: Which hosts were rolled back.
            worth: J after the tick.
        """
        paid = []
        back = [i in diverged for i in range(len(self.envs))]
        for env, *row in zip(self.envs, self.ops, self.before, self.acted, back, worth, strict=True):
            tick = as_tick(env, *row)
            paid.append(pay(tick, self.config.reward))
            if tick.slots and not tick.over:
                env.accounts = [settled(slot, tick) for slot in tick.slots]
        terms = {name: torch.tensor([row[name] for row in paid], dtype=torch.float64) for name in paid[0]}
        if self.config.governor.enabled:
            terms["rollback"] = -self.config.governor.penalty * torch.tensor(back, dtype=torch.float64)
        return terms

    def worth(self, accuracy: Tensor) -> Tensor:
        """J [N] of the hosts with what they have fossilized, if that has `accuracy` [N]."""
        config, envs = self.config.objective, self.envs
        parameters = torch.tensor([env.committed_parameters for env in envs])
        hosts = torch.tensor([env.host_parameters for env in envs])
        price, compute = torch.tensor([env.prices(config) for env in envs]).unbind(1)
        charge: Tensor | float = 0.0
        if config.prices_compute:
            flops = torch.tensor([[env.committed_flops, env.compute.host] for env in envs])
            charge = compute_rent(*flops.unbind(1), compute)
        return objective(accuracy, parameters, hosts, config, price, charge)


def moment_without_seeds(env: HostEnv) -> Moment:
    return Moment(env.ended, env.objective, env.validated, [])


def moment(env: HostEnv) -> Moment:
    return moment_without_seeds(env)._replace(seeds=[as_seed(slot) for slot in env.slots])


def acted(env: HostEnv, smallest_host: int) -> Acted:
    host = max(env.host_parameters, smallest_host)
    return Acted(
        seeds=[as_seed(slot) for slot in env.slots],
        accounts=list(env.accounts),
        growth=[count_parameters(slot.seed) / host for slot in env.slots],
        alpha=[slot.alpha_now if slot.blended else 0.0 for slot in env.slots],
    )


def as_seed(slot: SeedSlot) -> Seed:
    return Seed(slot.stage, slot.ticks_in_stage, slot.age, slot.fading)


def as_tick(
    env: HostEnv, op: str, before: Moment, after_decision: Acted | None, diverged: bool, objective: float
) -> Tick:
    """A tick of one host that is over."""
    validation_before, validation = before.validation, env.validated
    whole_before, whole, committed = validation_before.all_seeds, validation.all_seeds, validation.committed
    return Tick(
        op=op,
        over=before.ended,
        last=env.tick >= env.horizon,
        diverged=diverged,
        objective_before=before.objective,
        objective=objective,
        kept_objective_before=kept_objective(before.objective, validation_before),
        kept_objective=objective if env.tick >= env.horizon else kept_objective(objective, validation),
        accuracy_at_start=env.history.accuracy[0],
        accuracy_before=whole_before.accuracy,
        accuracy=whole.accuracy,
        kept_accuracy=committed.accuracy,
        bare_before=bare(validation_before),
        bare=bare(validation),
        loss_before=whole_before.loss,
        loss=whole.loss,
        kept_loss=committed.loss,
        chance=env.habitat.chance,
        slots=() if after_decision is None else slot_ticks(env, before, after_decision),
    )


def kept_objective(objective: float, validation: Validation) -> float:
    """J with the fossilized seeds alone, from J with live seeds: rent is the same."""
    return objective - validation.all_seeds.accuracy + validation.committed.accuracy


def bare(validation: Validation) -> float:
    """Accuracy with every seed switched off; with all of them where that was not asked for."""
    return (validation.all_seeds if validation.host_only is None else validation.host_only).accuracy


def slot_ticks(env: HostEnv, before: Moment, after_decision: Acted) -> tuple[SlotTick, ...]:
    """What happened in each slot."""
    then, now = before.validation.contributions, env.validated.contributions
    after = [as_seed(slot) for slot in env.slots]
    rows = zip(before.seeds, after_decision.seeds, after, after_decision.accounts, then, now, strict=True)
    sizes = zip(after_decision.growth, after_decision.alpha, strict=True)
    return tuple(SlotTick(*row, *size) for row, size in zip(rows, sizes, strict=True))
