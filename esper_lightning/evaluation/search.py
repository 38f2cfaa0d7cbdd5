"""The best fixed schedule: candidates raced on shared hosts, under a budget of environment steps.

A race: all candidates on the same few hosts, the better part of them on more, and so on. What they have in common, the
luck of the hosts, cancels. Random plans are raced first; then, again and again, the best ones against their neighbours;
in the end the winners of all races against each other. Where hosts are of a family every candidate meets equally many
of each member, because what is best for one of them says little. M members; 1 where all hosts are alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from esper_lightning.envs import HostPool
from esper_lightning.evaluation.compare import paired_difference, play
from esper_lightning.evaluation.intervals import Interval, mean_interval
from esper_lightning.evaluation.plans import Generator, Plan
from esper_lightning.rollout import EVALUATION, TRAINING, episode_seeds
from esper_lightning.tamiyo.replay import FixedSchedule
from esper_lightning.tamiyo.schedule import Schedule

FINALS = 2
"""Episodes of the pool, for each member, for the winners' race: all of them, then the best."""

WINNERS = 3
"""Of each race, who meet again in the last one."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How the best fixed schedule is searched."""

    steps: int = 17_280
    """Environment steps (host epochs) that may be spent: as many as the learned controller had, for fairness."""

    seed: int = 0
    """Of the candidates, and of the hosts that they meet."""

    max_seeds: int | None = None
    """Most seeds in a schedule. None: one in each slot."""

    explore: float = 0.13
    """Share of the budget for the first sight of random candidates, one host of each member."""

    one_in: int = 4
    """One in so many candidates survives each stage of a race."""

    decisive: int = 8
    """Hosts of each member on which a race is decided: the stage that gives every candidate as many is its last."""

    elites: int = 6
    """Best candidates of a race that stay for the next one, and whose children join them."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"search.steps must be at least 1, got {self.steps}")
        if self.seed < 0:
            raise ValueError(f"search.seed must not be negative, got {self.seed}")
        if self.max_seeds is not None and self.max_seeds < 1:
            raise ValueError(f"search.max_seeds must be at least 1, got {self.max_seeds}")
        if not 0.0 < self.explore <= 1.0:
            raise ValueError(f"search.explore must lie in (0, 1], got {self.explore}")
        for name, least in (("one_in", 2), ("decisive", 1), ("elites", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"search.{name} must be at least {least}, got {getattr(self, name)}")


class Found(NamedTuple):
    """What a search has come to."""

    schedule: Schedule
    steps: int
    """Environment steps that were spent on it."""
    candidates: int
    """Schedules that were tried."""
    estimate: Interval
    """Of its objective on fresh hosts, test images: after the search, so free of the luck of being chosen."""
    lead: Interval | None
    """Over the runner-up, on the same hosts, paired; None: there was no other."""
    confirmation_steps: int
    """Environment steps of these two, beside the search."""


class Racer:
    """Races schedules in a pool.

    Args:
        pool: It is used up, an episode for every stage of a race.
        seed: Of the hosts.
        episodes: Of the pool, that may be spent.
        one_in: Of so many candidates one survives a stage.
    """

    def __init__(self, pool: HostPool, seed: int, episodes: int, one_in: int) -> None:
        self.pool = pool
        self.members = len(pool.bench.family.members)
        self.seed = seed
        self.left = episodes
        self.spent = 0
        self.one_in = one_in

    @property
    def steps(self) -> int:
        return self.spent * self.pool.n_envs * self.pool.config.horizon

    def affordable(self, episodes: int) -> int:
        """Candidates that so many episodes give a first look: a host of each member."""
        return episodes * self.pool.n_envs // self.members

    def race(self, schedules: Sequence[Schedule], decisive: int | None = None, reserve: int = 0) -> list[int]:
        """The numbers of the schedules from best to worst; who got further is better.

        The last stage is the one with `decisive` hosts of each member, or after which a `reserve` of episodes is left.
        None: with two candidates or so, and each stage may take half of the budget that is left. If that does not allow
        all a first look, the last ones are left out.
        """
        alive = list(range(len(schedules)))[: self.affordable(self.left)]
        scores: dict[int, list[float]] = {i: [] for i in alive}
        out: list[int] = []
        hosts = 0
        while self.affordable(self.left) >= len(alive) and (len(alive) > 1 or not hosts):
            room = 1 if decisive is not None else max(1, self.left // 2)
            measured = self._stage([schedules[i] for i in alive], room)
            hosts = measured.shape[1]
            for i, row in zip(alive, measured, strict=True):
                scores[i] += row.tolist()
            # Everyone here has met the same hosts since the race began.
            alive.sort(key=lambda i: -float(np.mean(scores[i])))
            if (decisive is not None and hosts >= decisive * self.members) or self.left <= reserve:
                break
            survivors = -(-len(alive) // self.one_in)
            alive, out = alive[:survivors], alive[survivors:] + out
        return alive + out

    def _stage(self, schedules: Sequence[Schedule], room: int) -> np.ndarray:  # [candidates, hosts] objective
        """All of these on the same new hosts, as many as there is room for in so many episodes, but a first look."""
        n_envs = self.pool.n_envs
        each = max(1, room * n_envs // len(schedules) // self.members)
        if self.members == 1:
            seeds = episode_seeds(self.seed, TRAINING, self.spent, each)
        else:
            seeds = draw_hosts(self.pool, each, Random(f"{self.seed} {self.spent}")).ravel().tolist()
        cells = [(schedule, seed) for schedule in schedules for seed in seeds]
        episodes = -(-len(cells) // n_envs)
        self.left -= episodes
        self.spent += episodes
        return np.array(play_cells(self.pool, cells)).reshape(len(schedules), -1)


def draw_hosts(pool: HostPool, number: int, drawn: Random) -> np.ndarray:  # [M, number] int64
    """Seeds of so many hosts of each member. They are even, as those of training are."""
    family = pool.bench.family
    seeds: dict[str, list[int]] = {repr(member): [] for member in family.members}
    while min(map(len, seeds.values())) < number:
        host = 2 * drawn.randrange(2**60)
        seeds[repr(family.draw(host))].append(host)
    return np.array([row[:number] for row in seeds.values()])


def play_cells(pool: HostPool, cells: Sequence[tuple[Schedule, int]]) -> list[float]:
    """The objective, by validation images, that each schedule ends with on the host of its seed; an episode of the pool
    for as many as it has environments."""
    found: list[float] = []
    for start in range(0, len(cells), pool.n_envs):
        part = cells[start : start + pool.n_envs]
        schedules, seeds = zip(*part, *[part[0]] * (pool.n_envs - len(part)), strict=True)
        controller = FixedSchedule(schedules)
        pool.reset(seeds)
        controller.reset(pool)
        for _ in range(pool.config.horizon):
            result = pool.step(controller.act(pool))
        found += result.metrics.objective[: len(part)].tolist()
    return found


def search(pool: HostPool, config: SearchConfig = SearchConfig()) -> Found:
    """Searches with the hosts of training and their validation images; the pool is used up."""
    episode = pool.n_envs * pool.config.horizon
    episodes = config.steps // episode
    if episodes < 1:
        raise ValueError(f"search.steps is {config.steps}, less than one episode of {pool.n_envs} hosts: {episode}")
    generator = Generator(pool, config.seed, config.max_seeds)
    racer = Racer(pool, config.seed, episodes, config.one_in)
    if racer.affordable(episodes) < 1:
        raise ValueError(
            f"search.steps is {config.steps}; to see a schedule on one host of each of the {racer.members} members of"
            f" the family takes {-(-racer.members // pool.n_envs) * episode}"
        )
    known: set[Plan] = set()

    def race(plans: list[Plan], **end: int) -> list[Plan]:
        known.update(plans)
        return [plans[i] for i in racer.race([generator.schedule(plan) for plan in plans], **end)]

    finals = min(FINALS * racer.members, max(FINALS, episodes // 4))
    first = max(1, racer.affordable(max(1, round(config.explore * episodes))))
    best = race(generator.distinct(first, known), decisive=config.decisive, reserve=finals)
    size = max(2, pool.n_envs // 2)
    winners: list[Plan] = []
    while racer.left > finals and racer.affordable(racer.left) > 1:
        parents = best[: min(config.elites, size // 2)]
        winners = [*parents[:WINNERS], *winners]
        children = generator.distinct(size - len(parents), known, parents)
        best = race([*parents, *children], decisive=config.decisive, reserve=finals)
    winners = list(dict.fromkeys([*best[:WINNERS], *winners]))[: max(2, pool.n_envs // config.decisive)]
    if len(winners) > 1 and racer.affordable(racer.left) > 1:
        winners = race(winners)
    fresh = episode_seeds(config.seed, EVALUATION, 1, pool.n_envs)  # of episode 0 are those that Tamiyo is judged on
    ours, *others = (play(pool, str(i), FixedSchedule(generator.schedule(p)), fresh) for i, p in enumerate(winners[:2]))
    return Found(
        schedule=generator.schedule(winners[0]),
        steps=racer.steps,
        candidates=len(known),
        estimate=mean_interval(ours.objective),
        lead=paired_difference(ours, others[0]) if others else None,
        confirmation_steps=(1 + len(others)) * episode,
    )
