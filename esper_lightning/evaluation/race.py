"""Successive halving of schedules: all are played on the same few hosts, the better ones on further hosts, and so on.

All candidates meet the same hosts, so the hosts' luck cancels in comparisons. With several contexts every candidate
meets equally many hosts of each, because the best schedule for one context says little about the others.
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
    """Ranks schedules by successive halving in a pool, within a budget of episodes.

    Args:
        pool: Pool that plays the schedules, one or more episodes per stage; its state is overwritten.
        rng_seed: RNG seed of the hosts.
        episodes: Budget in episodes of the whole pool.
        reduction: Factor by which each stage reduces the number of candidates.
        contexts: Contexts that hosts are drawn from. None: all contexts of the pool's distribution.
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
        """Return how many candidates can each play one host per context within `episodes` episodes."""
        return max(0, episodes) * self.pool.n_envs // self.members

    def race(self, schedules: Sequence[Schedule], decisive: int | None = None, reserve: int = 0) -> list[int]:
        """Return the indices of the schedules from best to worst; a schedule that reaches a later stage ranks higher.

        If the budget does not allow one host per context for every schedule, the last ones are left out.

        Args:
            schedules: Candidates.
            decisive: Hosts per context of the last stage. None: stages continue until about two candidates are left,
                and each may use half of the remaining budget.
            reserve: Episodes of the budget that must remain.
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
            # All remaining candidates have met the same hosts in this race.
            alive.sort(key=lambda i: -float(np.mean(scores[i])))
            if decisive is not None and hosts >= decisive * self.members:
                break
            survivors = -(-len(alive) // self.one_in)
            alive, out = alive[:survivors], alive[survivors:] + out
        return alive + out

    def _stage(self, schedules: Sequence[Schedule], room: int) -> np.ndarray:  # [candidates, hosts] objective
        """Play all schedules on the same new hosts.

        The number of hosts is what fits into `max_episodes` episodes, but at least one per context.
        """
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
    """Return RNG seeds of `number` hosts of each given context (None: all). They are even, like those of training."""
    family = pool.bench.family
    seeds: dict[str, list[int]] = {repr(member): [] for member in among or family.members}
    while min(map(len, seeds.values())) < number:
        host = 2 * drawn.randrange(2**60)
        seeds.get(repr(family.draw(host)), []).append(host)
    return np.array([row[:number] for row in seeds.values()])


def play_cells(pool: HostPool, cells: Sequence[tuple[Schedule, int]]) -> list[float]:
    """Return the final objective, on validation samples, of each schedule on the host with the given RNG seed.

    One episode of the pool is played per `pool.n_envs` pairs.
    """
    found: list[float] = []
    for start in range(0, len(cells), pool.n_envs):
        part = cells[start : start + pool.n_envs]
        schedules, seeds = zip(*part, *[part[0]] * (pool.n_envs - len(part)), strict=True)
        found += final_objectives(pool, FixedSchedule(schedules), seeds)[: len(part)]
    return found


def final_objectives(pool: HostPool, controller: Controller, seeds: Sequence[int]) -> list[float]:
    """Return the final objective, on validation samples, of each host after an episode of `controller`."""
    pool.reset(seeds)
    controller.reset(pool)
    for _ in range(pool.config.horizon):
        step = pool.step(controller.act(pool))
    return step.metrics.objective.tolist()
