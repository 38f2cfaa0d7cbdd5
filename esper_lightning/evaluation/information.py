"""Value of information of a context distribution: the possible gain from knowing the context over one fixed schedule.

If the value is zero, one schedule suits every host and no controller can gain by reacting; training on the distribution
is pointless. P plans, M contexts, R hosts per context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from esper_lightning.envs import HostPool
from esper_lightning.envs.family import Member, values_of
from esper_lightning.evaluation.intervals import Interval, interval_of_groups
from esper_lightning.evaluation.plans import Generator, Plan
from esper_lightning.evaluation.race import draw_hosts, play_cells
from esper_lightning.tamiyo.schedule import Schedule

EVERYTHING = "all facts"

NOTHING = Plan((), late=False)
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
        for name, least in (("plans", 1), ("finalists", 2), ("hosts", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"information.{name} must be at least {least}, got {getattr(self, name)}")


class Best(NamedTuple):
    """Best schedule for one context, and its objective compared with that of the best common schedule."""

    member: str
    schedule: Schedule
    """Schedule with the best mean objective over all hosts of the context."""
    objective: float
    """Objective on one half of the hosts of the schedule that is best on the other half, averaged over both halves.
    That schedule may differ from `schedule`."""
    common: float
    """Objective on one half of the hosts of the schedule that is best for all contexts on the other half, averaged
    likewise."""


class Information(NamedTuple):
    """Value of information, in units of the objective."""

    facts: dict[str, Interval]
    """Gain over the best common schedule if the schedule is chosen knowing one context variable, or (`all facts`) all.
    It is measured on hosts that had no part in the choice, and concerns the played schedules only: a poor choice for
    one context makes it too low, a poor common schedule too high. The interval is over the hosts of each context and
    takes the choices as given."""
    per_host: float
    """Mean over hosts of the best objective of each host minus that of the best common schedule.
    It is measured on the hosts that selected, so it includes their luck, which no controller can know; it concerns the
    played schedules only."""
    members: list[Best]
    schedule: Schedule
    """Best schedule for all contexts."""
    steps: int
    """Environment steps that were played."""


def value_of_information(pool: HostPool, config: InformationConfig = InformationConfig()) -> Information:
    """Estimate the value of information by playing schedules in every context of the pool's distribution.

    Only validation samples are used. The state of the pool is overwritten. Raises ValueError if there is only one
    context.
    """
    members = pool.bench.family.members
    if len(members) < 2:
        raise ValueError("there is one kind of host only, so there is nothing to know; name facts in data.env.family")
    if config.finalists <= len(members):
        raise ValueError(
            f"look.finalists is {config.finalists}: the best schedule for each of {len(members)} members and the best "
            f"for all need {len(members) + 1}"
        )
    hosts = draw_hosts(pool, 2 + config.hosts, Random(config.seed))
    grid = Grid(pool, Generator(pool, config.seed))
    plans = [NOTHING, *grid.generator.distinct(config.plans, {NOTHING})]
    seen = grid.play(plans, hosts[:, :1])
    parents = [plans[i] for i in best_few(seen, max(3, config.plans // 4)) if plans[i] != NOTHING]
    plans = [NOTHING, *parents, *grid.generator.distinct(config.plans, set(plans), parents)]
    seen = grid.play(plans, hosts[:, 1:2])  # parents again, on other hosts: their first result may have been luck
    finalists = [plans[i] for i in best_few(seen, config.finalists)]
    found = grid.play(finalists, hosts[:, 2:])
    one = np.zeros(len(members), dtype=int)
    common, own = chosen_and_judged(found, one), chosen_and_judged(found, np.arange(len(members)))
    gains = {name: interval_of_groups(chosen_and_judged(found, of) - common) for name, of in facts(members)}
    schedules = [grid.generator.schedule(plan) for plan in finalists]
    favourites = found.mean(2).argmax(0)
    table = zip(members, favourites, own.mean(1), common.mean(1), strict=True)
    return Information(
        facts=gains,
        per_host=float((found.max(0) - found[found.mean((1, 2)).argmax()]).mean()),
        members=[
            Best(what_differs(member, members), schedules[i], float(mine), float(ours))
            for member, i, mine, ours in table
        ],
        schedule=schedules[found.mean((1, 2)).argmax()],
        steps=grid.steps,
    )


def what_differs(member: Member, members: Sequence[Member]) -> str:
    """Return the context's variables that differ between contexts, as text."""
    shared = set.intersection(*({f"{name} {value}" for name, value in other.facts} for other in members))
    return ", ".join(fact for name, value in member.facts if (fact := f"{name} {value}") not in shared)


class Grid:
    """Plays every plan on every host.

    Args:
        pool: Pool that plays the schedules, one episode per `pool.n_envs` pairs of plan and host; its state is
            overwritten.
        sampler: Sampler that converts plans to schedules.
    """

    def __init__(self, pool: HostPool, generator: Generator) -> None:
        self.pool = pool
        self.generator = generator
        self.steps = 0

    def play(self, plans: Sequence[Plan], hosts: np.ndarray) -> np.ndarray:  # [M, R] RNG seeds -> [P, M, R] objective
        """Return the final objective of each plan on each host."""
        pool = self.pool
        cells = [(self.generator.schedule(plan), int(seed)) for plan in plans for seed in hosts.ravel()]
        self.steps += -(-len(cells) // pool.n_envs) * pool.n_envs * pool.config.horizon
        return np.array(play_cells(pool, cells)).reshape(len(plans), *hosts.shape)


def best_few(seen: np.ndarray, number: int) -> list[int]:  # [P, M, R]
    """Return the indices of up to `number` plans, the best ones first.

    The best plan for all contexts and the best for each come first, then the second best of each, and so on.
    """
    scores = np.concatenate([seen.mean((1, 2))[:, None], seen.mean(2)], 1)  # [P, 1 + M]
    ranked = np.argsort(-scores, axis=0, kind="stable").ravel()
    return list(dict.fromkeys(map(int, ranked)))[:number]


def chosen_and_judged(found: np.ndarray, groups: np.ndarray) -> np.ndarray:  # [P, M, R], [M] -> [M, R]
    """Return the objective on each host of the best plan for the group of its context, selected without that host.

    The plan is selected on the half of the hosts that does not contain the host, so the luck of the selecting hosts is
    not counted.
    """
    halves = np.arange(found.shape[2]) % 2
    judged = np.empty(found.shape[1:])
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        for half in (0, 1):
            chosen = found[:, members][:, :, halves != half].mean((1, 2)).argmax()
            judged[np.ix_(members, np.flatnonzero(halves == half))] = found[chosen, members][:, halves == half]
    return judged


def facts(members: Sequence[Member]) -> list[tuple[str, np.ndarray]]:
    """Return each context variable that differs, and all together, with the group [M] of each context under it."""
    rows = [dict(member.facts) for member in members]
    groups = [
        (name, np.array([values.index(row.get(name)) for row in rows]))
        for name, values in values_of(members).items()
        if len(values) > 1
    ]
    return [*groups, (EVERYTHING, np.arange(len(members)))]
