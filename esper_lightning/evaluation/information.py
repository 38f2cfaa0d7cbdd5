"""The value of information of a family: what knowing its facts could gain over one fixed schedule for all.

Where that is nothing, one schedule suits every host, and no controller can earn its keep by reacting: it should not be
trained there. P plans, M members, R hosts each.
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
"""Never to grow."""


@dataclass(frozen=True, kw_only=True)
class InformationConfig:
    """How closely a family is looked at."""

    plans: int = 48
    """Schedules that are drawn at random, and as many again from the best of them: each meets one host per member."""

    finalists: int = 48
    """Most schedules that are compared in the end: the best for all and the best for each member, then the second best
    of each, and so on. At least one more than there are members."""

    hosts: int = 6
    """Fresh hosts per member on which finalists are compared. Half of them choose, the other half judge."""

    seed: int = 0
    """Of plans and hosts."""

    def __post_init__(self) -> None:
        for name, least in (("plans", 1), ("finalists", 2), ("hosts", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"information.{name} must be at least {least}, got {getattr(self, name)}")


class Best(NamedTuple):
    """What one member wants."""

    member: str
    schedule: Schedule
    """The best one on all of its hosts."""
    objective: float
    """Of the schedule that is the best on half of its hosts, on the other half: so not always that of `schedule`."""
    common: float
    """Of the schedule that is the best for all members on half of the hosts, on the other half."""


class Information(NamedTuple):
    """What knowing is worth, in objective."""

    facts: dict[str, Interval]
    """Gain over the one best schedule, on hosts that had no part in the choice, when the best schedule is chosen
    knowing one fact of the episode, or (`all facts`) its member. It is about the schedules that were played: a poor
    choice for one member makes it too low, and a poor one best schedule too high. The interval is over the hosts of
    each member, and takes the choices as they are."""
    per_host: float
    """Mean over hosts of the best schedule for that very host minus the one best: on the hosts that it was chosen on,
    so it counts their luck, too, and nobody can know that. About the schedules that were played, too."""
    members: list[Best]
    schedule: Schedule
    """The best one for all."""
    steps: int
    """Environment steps that were spent."""


def value_of_information(pool: HostPool, config: InformationConfig = InformationConfig()) -> Information:
    """Plays schedules on the members of the pool's family, validation images alone; the pool is used up.

    Raises ValueError if there is one member only.
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
    seen = grid.play(plans, hosts[:, 1:2])  # parents, too: on other hosts they might only have been luckier
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
    """The member's facts that not all members share."""
    shared = set.intersection(*({f"{name} {value}" for name, value in other.facts} for other in members))
    return ", ".join(fact for name, value in member.facts if (fact := f"{name} {value}") not in shared)


class Grid:
    """Plays plans on hosts, every one on each of them.

    Args:
        pool: It is used up, an episode for as many cells as it has environments.
        generator: Spells plans out.
    """

    def __init__(self, pool: HostPool, generator: Generator) -> None:
        self.pool = pool
        self.generator = generator
        self.steps = 0

    def play(self, plans: Sequence[Plan], hosts: np.ndarray) -> np.ndarray:  # [M, R] seeds -> [P, M, R] objective
        """The objective that each plan ends with."""
        pool = self.pool
        cells = [(self.generator.schedule(plan), int(seed)) for plan in plans for seed in hosts.ravel()]
        self.steps += -(-len(cells) // pool.n_envs) * pool.n_envs * pool.config.horizon
        return np.array(play_cells(pool, cells)).reshape(len(plans), *hosts.shape)


def best_few(seen: np.ndarray, number: int) -> list[int]:  # [P, M, R]
    """The best plan for all members and the best for each, then the second best of each kind, and so on, up to
    `number`."""
    scores = np.concatenate([seen.mean((1, 2))[:, None], seen.mean(2)], 1)  # [P, 1 + M]
    ranked = np.argsort(-scores, axis=0, kind="stable").ravel()
    return list(dict.fromkeys(map(int, ranked)))[:number]


def chosen_and_judged(found: np.ndarray, groups: np.ndarray) -> np.ndarray:  # [P, M, R], [M] -> [M, R]
    """The objective on each host of the plan that is best for its member's group, chosen on the hosts that are not in
    the same half as this one: so the luck of those that chose is not counted."""
    halves = np.arange(found.shape[2]) % 2
    judged = np.empty(found.shape[1:])
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        for half in (0, 1):
            chosen = found[:, members][:, :, halves != half].mean((1, 2)).argmax()
            judged[np.ix_(members, np.flatnonzero(halves == half))] = found[chosen, members][:, halves == half]
    return judged


def facts(members: Sequence[Member]) -> list[tuple[str, np.ndarray]]:
    """Each fact in which members differ, and all together; with the group [M] that each member belongs to by it."""
    rows = [dict(member.facts) for member in members]
    groups = [
        (name, np.array([values.index(row.get(name)) for row in rows]))
        for name, values in values_of(members).items()
        if len(values) > 1
    ]
    return [*groups, (EVERYTHING, np.arange(len(members)))]
