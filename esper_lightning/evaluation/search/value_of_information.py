"""Value of information of a context distribution: the possible gain from knowing the context over one fixed schedule.

If the value is zero, one schedule suits every host and no controller can gain by reacting; training on the distribution
is pointless. P plans, M contexts, R hosts per context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from esper_lightning.controllers.schedule import Schedule
from esper_lightning.envs import HostPool
from esper_lightning.envs.config import MAX_HOSTS
from esper_lightning.envs.context.distribution import Context, distinct_values
from esper_lightning.envs.seeding import check_rng_seed
from esper_lightning.evaluation.search.plans import Plan, PlanSampler
from esper_lightning.evaluation.search.successive_halving import play_cells, sample_host_seeds
from esper_lightning.evaluation.statistics import Interval, stratified_interval

ALL_VARIABLES = "all variables"

EMPTY_PLAN = Plan((), fossilize_late=False)
"""Plan without any seeds."""


@dataclass(frozen=True, kw_only=True)
class InformationConfig:
    """Numbers of plans and hosts in the estimate of the value of information."""

    plans: int = 48
    """Number of random schedules, and of further schedules derived from the best of them. Each is played on one host
    per context."""

    finalists: int = 48
    """Maximum number of schedules in the final comparison; it must exceed the number of contexts.
    They are the best for all contexts and for each context, then the second best of each, and so on."""

    hosts: int = 6
    """Fresh hosts per context on which finalists are compared. One half selects, the other half measures."""

    seed: int = 0
    """RNG seed of plans and hosts."""

    def __post_init__(self) -> None:
        for name, least in (("plans", 1), ("finalists", 2), ("hosts", 2)):
            if not least <= getattr(self, name) <= MAX_HOSTS:
                raise ValueError(f"information.{name} must lie in {least} … {MAX_HOSTS}, got {getattr(self, name)}")
        check_rng_seed("information.seed", self.seed)


class BestPlan(NamedTuple):
    """Best schedule for one context, and its objective compared with that of the best common schedule."""

    context: str
    schedule: Schedule
    """Schedule with the best mean objective over all hosts of the context."""
    objective: float
    """Objective on one half of the hosts of the schedule that is best on the other half, averaged over both halves.
    The best schedule of one half may differ from `schedule`."""
    common_objective: float
    """Objective on one half of the hosts of the schedule that is best for all contexts on the other half, averaged
    likewise."""


class InformationValue(NamedTuple):
    """Value of information, in units of the objective."""

    gains: dict[str, Interval]
    """Gain over the best common schedule if the schedule is chosen knowing one variable, or all (`all variables`).
    It is measured on hosts that had no part in the choice, and concerns the played schedules only: a poor choice for
    one context makes it too low, a poor common schedule too high. The interval is over the hosts of each context and
    takes the choices as given."""
    hindsight_gain: float
    """Mean over hosts of the best objective of each host minus that of the best common schedule.
    It is measured on the hosts that selected, so it includes their luck, which no controller can know; it concerns the
    played schedules only."""
    contexts: list[BestPlan]
    common_schedule: Schedule
    """Best schedule for all contexts."""
    steps: int
    """Environment steps that were played."""


def value_of_information(pool: HostPool, config: InformationConfig = InformationConfig()) -> InformationValue:
    """Estimate the value of information by playing schedules in every context of the pool's distribution.

    Only validation samples are used. The state of the pool is overwritten. Raises ValueError if there is only one
    context.
    """
    contexts = pool.env_factory.context_distribution.contexts
    if len(contexts) < 2:
        raise ValueError(
            "there is one kind of host only, so there is nothing to know; name variables in data.env.family"
        )
    if config.finalists <= len(contexts):
        raise ValueError(
            f"look.finalists is {config.finalists}: the best schedule for each of {len(contexts)} contexts and the "
            f"best for all need {len(contexts) + 1}"
        )
    hosts = sample_host_seeds(pool, 2 + config.hosts, Random(config.seed))
    evaluator = PlanEvaluator(pool, PlanSampler(pool, config.seed))
    plans = [EMPTY_PLAN, *evaluator.sampler.sample_distinct(config.plans, {EMPTY_PLAN})]
    objectives = evaluator.evaluate(plans, hosts[:, :1])
    parents = [plans[i] for i in select_finalists(objectives, max(3, config.plans // 4)) if plans[i] != EMPTY_PLAN]
    plans = [EMPTY_PLAN, *parents, *evaluator.sampler.sample_distinct(config.plans, set(plans), parents)]
    # The parents again, on other hosts: their first result may have been luck.
    objectives = evaluator.evaluate(plans, hosts[:, 1:2])
    finalists = [plans[i] for i in select_finalists(objectives, config.finalists)]
    final_objectives = evaluator.evaluate(finalists, hosts[:, 2:])
    single_group = np.zeros(len(contexts), dtype=int)
    common, own = (
        cross_validated_objective(final_objectives, single_group),
        cross_validated_objective(final_objectives, np.arange(len(contexts))),
    )
    gains = {
        name: stratified_interval(cross_validated_objective(final_objectives, of) - common)
        for name, of in context_groups(contexts)
    }
    schedules = [evaluator.sampler.to_schedule(plan) for plan in finalists]
    best_indices = final_objectives.mean(2).argmax(0)
    rows = zip(contexts, best_indices, own.mean(1), common.mean(1), strict=True)
    return InformationValue(
        gains=gains,
        hindsight_gain=float(
            (final_objectives.max(0) - final_objectives[final_objectives.mean((1, 2)).argmax()]).mean()
        ),
        contexts=[
            BestPlan(varying_variables(context, contexts), schedules[i], float(own_objective), float(common_objective))
            for context, i, own_objective, common_objective in rows
        ],
        common_schedule=schedules[final_objectives.mean((1, 2)).argmax()],
        steps=evaluator.steps,
    )


def varying_variables(context: Context, contexts: Sequence[Context]) -> str:
    """Return the context's variables that differ between contexts, as text."""
    shared = set.intersection(
        *({f"{name} {value}" for name, value in context_of_family.variables} for context_of_family in contexts)
    )
    return ", ".join(variable for name, value in context.variables if (variable := f"{name} {value}") not in shared)


class PlanEvaluator:
    """Plays every plan on every host.

    Args:
        pool: Pool that plays the schedules, one episode per `pool.n_envs` pairs of plan and host; its state is
            overwritten.
        sampler: Sampler that converts plans to schedules.
    """

    def __init__(self, pool: HostPool, sampler: PlanSampler) -> None:
        self.pool = pool
        self.sampler = sampler
        self.steps = 0

    def evaluate(
        self, plans: Sequence[Plan], hosts: np.ndarray
    ) -> np.ndarray:  # [M, R] RNG seeds -> [P, M, R] objective
        """Return the final objective of each plan on each host."""
        pool = self.pool
        cells = [(self.sampler.to_schedule(plan), int(seed)) for plan in plans for seed in hosts.ravel()]
        self.steps += -(-len(cells) // pool.n_envs) * pool.n_envs * pool.config.horizon
        return np.array(play_cells(pool, cells)).reshape(len(plans), *hosts.shape)


def select_finalists(objectives: np.ndarray, number: int) -> list[int]:  # [P, M, R]
    """Return the indices of up to `number` plans, the best ones first.

    The best plan for all contexts and the best for each come first, then the second best of each, and so on.
    """
    scores = np.concatenate([objectives.mean((1, 2))[:, None], objectives.mean(2)], 1)  # [P, 1 + M]
    ranked = np.argsort(-scores, axis=0, kind="stable").ravel()
    return list(dict.fromkeys(map(int, ranked)))[:number]


def cross_validated_objective(objectives: np.ndarray, groups: np.ndarray) -> np.ndarray:  # [P, M, R], [M] -> [M, R]
    """Return the objective on each host of the best plan for the group of its context, selected without that host.

    The plan is selected on the half of the hosts that does not contain the host, so the luck of the selecting hosts is
    not counted.
    """
    halves = np.arange(objectives.shape[2]) % 2
    measured = np.empty(objectives.shape[1:])
    for group in np.unique(groups):
        group_contexts = np.flatnonzero(groups == group)
        for half in (0, 1):
            best_plan = objectives[:, group_contexts][:, :, halves != half].mean((1, 2)).argmax()
            measured[np.ix_(group_contexts, np.flatnonzero(halves == half))] = objectives[best_plan, group_contexts][
                :, halves == half
            ]
    return measured


def context_groups(contexts: Sequence[Context]) -> list[tuple[str, np.ndarray]]:
    """Return each context variable that differs, and all together, with the group [M] of each context under it."""
    rows = [dict(context.variables) for context in contexts]
    groups = [
        (name, np.array([values.index(row.get(name)) for row in rows]))
        for name, values in distinct_values(contexts).items()
        if len(values) > 1
    ]
    return [*groups, (ALL_VARIABLES, np.arange(len(contexts)))]
