"""A race of schedules: all on the same few hosts, the better part of them on more, and so on.

What candidates have in common, the luck of the hosts, cancels. Where hosts are of a family every candidate meets
equally many of each member, because what is best for one of them says little.
"""

from collections.abc import Sequence
from random import Random

import numpy as np

from esper_lightning.envs import HostPool
from esper_lightning.envs.family import Member
from esper_lightning.rollout import TRAINING, episode_seeds
from esper_lightning.tamiyo.controller import Controller
from esper_lightning.tamiyo.replay import FixedSchedule
from esper_lightning.tamiyo.schedule import Schedule


class Racer:
    """Races schedules in a pool.

    Args:
        pool: It is used up, an episode for every stage of a race.
        seed: Of the hosts.
        episodes: Of the pool, that may be spent.
        one_in: Of so many candidates one survives a stage.
        among: Members of the pool's family that hosts are drawn from. None: all.
    """

    def __init__(
        self, pool: HostPool, seed: int, episodes: int, one_in: int, among: Sequence[Member] | None = None
    ) -> None:
        self.pool = pool
        self.among = pool.bench.family.members if among is None else among
        self.members = len(self.among)
        self.seed = seed
        self.left = episodes
        self.spent = 0
        self.met: set[Schedule] = set()
        self.one_in = one_in

    @property
    def steps(self) -> int:
        return self.spent * self.pool.n_envs * self.pool.config.horizon

    def affordable(self, episodes: int) -> int:
        """Candidates that so many episodes give a first look: a host of each member."""
        return max(0, episodes) * self.pool.n_envs // self.members

    def race(self, schedules: Sequence[Schedule], decisive: int | None = None, reserve: int = 0) -> list[int]:
        """The numbers of the schedules from best to worst; who got further is better.

        The last stage is the one with `decisive` hosts of each member. None: the one with two candidates or so, and
        each stage may take half of the budget that is left. A `reserve` of episodes is not touched. If the rest does
        not allow all a first look, the last ones are left out.
        """
        alive = list(range(len(schedules)))[: self.affordable(self.left - reserve)]
        scores: dict[int, list[float]] = {i: [] for i in alive}
        out: list[int] = []
        hosts = 0
        while alive and self.affordable(self.left - reserve) >= len(alive) and (len(alive) > 1 or not hosts):
            room = 1 if decisive is not None else max(1, self.left // 2)
            measured = self._stage([schedules[i] for i in alive], room)
            hosts = measured.shape[1]
            for i, row in zip(alive, measured, strict=True):
                scores[i] += row.tolist()
            # Everyone here has met the same hosts since the race began.
            alive.sort(key=lambda i: -float(np.mean(scores[i])))
            if decisive is not None and hosts >= decisive * self.members:
                break
            survivors = -(-len(alive) // self.one_in)
            alive, out = alive[:survivors], alive[survivors:] + out
        return alive + out

    def _stage(self, schedules: Sequence[Schedule], room: int) -> np.ndarray:  # [candidates, hosts] objective
        """All of these on the same new hosts, as many as there is room for in so many episodes, but a first look."""
        n_envs = self.pool.n_envs
        each = max(1, room * n_envs // len(schedules) // self.members)
        if len(self.pool.bench.family.members) == 1:
            seeds = episode_seeds(self.seed, TRAINING, self.spent, each)
        else:
            seeds = draw_hosts(self.pool, each, Random(f"{self.seed} {self.spent}"), self.among).ravel().tolist()
        self.met.update(schedules)
        cells = [(schedule, seed) for schedule in schedules for seed in seeds]
        episodes = -(-len(cells) // n_envs)
        self.left -= episodes
        self.spent += episodes
        return np.array(play_cells(self.pool, cells)).reshape(len(schedules), -1)


def draw_hosts(
    pool: HostPool, number: int, drawn: Random, among: Sequence[Member] | None = None
) -> np.ndarray:  # [M, number] int64
    """Seeds of so many hosts of each of these members, or of all. They are even, as those of training are."""
    family = pool.bench.family
    seeds: dict[str, list[int]] = {repr(member): [] for member in among or family.members}
    while min(map(len, seeds.values())) < number:
        host = 2 * drawn.randrange(2**60)
        seeds.get(repr(family.draw(host)), []).append(host)
    return np.array([row[:number] for row in seeds.values()])


def play_cells(pool: HostPool, cells: Sequence[tuple[Schedule, int]]) -> list[float]:
    """The objective, by validation images, that each schedule ends with on the host of its seed; an episode of the pool
    for as many as it has environments."""
    found: list[float] = []
    for start in range(0, len(cells), pool.n_envs):
        part = cells[start : start + pool.n_envs]
        schedules, seeds = zip(*part, *[part[0]] * (pool.n_envs - len(part)), strict=True)
        found += final_objectives(pool, FixedSchedule(schedules), seeds)[: len(part)]
    return found


def final_objectives(pool: HostPool, controller: Controller, seeds: Sequence[int]) -> list[float]:
    """The objective, by validation images, that each host ends an episode of `controller` with."""
    pool.reset(seeds)
    controller.reset(pool)
    for _ in range(pool.config.horizon):
        step = pool.step(controller.act(pool))
    return step.metrics.objective.tolist()
