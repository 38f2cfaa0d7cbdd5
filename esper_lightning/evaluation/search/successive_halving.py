"""Successive halving of schedules: all are played on the same few hosts, the better ones on further hosts, and so on.

All candidates meet the same hosts, so the hosts' luck cancels in comparisons. With several contexts every candidate
meets equally many hosts of each, because the best schedule for one context says little about the others.
"""

from collections.abc import Sequence
from random import Random

import numpy as np

from esper_lightning.controllers.fixed_schedule import FixedSchedule
from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.schedule import Schedule
from esper_lightning.envs import HostPool
from esper_lightning.envs.context.distribution import Context
from esper_lightning.envs.seeding import TRAINING, episode_rng_seeds


class SuccessiveHalving:
    """Ranks schedules by successive halving in a pool, within a budget of episodes.

    Args:
        pool: Pool that plays the schedules, one or more episodes per stage; its state is overwritten.
        rng_seed: RNG seed of the hosts.
        episodes: Budget in episodes of the whole pool.
        reduction: Factor by which each stage reduces the number of candidates.
        contexts: Contexts that hosts are drawn from. None: all contexts of the pool's distribution.
    """

    def __init__(
        self, pool: HostPool, rng_seed: int, *, episodes: int, reduction: int, contexts: Sequence[Context] | None = None
    ) -> None:
        self.pool = pool
        self.contexts = pool.env_factory.context_distribution.contexts if contexts is None else contexts
        self.n_contexts = len(self.contexts)
        self.rng_seed = rng_seed
        self.episodes_left = episodes
        self.episodes_spent = 0
        self.played_schedules: set[Schedule] = set()
        self.reduction = reduction

    @property
    def steps(self) -> int:
        return self.episodes_spent * self.pool.n_envs * self.pool.config.horizon

    def max_candidates(self, episodes: int) -> int:
        """Return how many candidates can each play one host per context within `episodes` episodes."""
        return max(0, episodes) * self.pool.n_envs // self.n_contexts

    def rank(self, schedules: Sequence[Schedule], decisive: int | None = None, reserve: int = 0) -> list[int]:
        """Return the indices of the schedules from best to worst; a schedule that reaches a later stage ranks higher.

        If the budget does not allow one host per context for every schedule, the last ones are left out.

        Args:
            schedules: Candidates.
            decisive: Hosts per context of the last stage. None: stages continue until about two candidates are left,
                and each may use half of the remaining budget.
            reserve: Episodes of the budget that must remain.
        """
        remaining = list(range(len(schedules)))[: self.max_candidates(self.episodes_left - reserve)]
        scores: dict[int, list[float]] = {i: [] for i in remaining}
        eliminated: list[int] = []
        hosts = 0
        while (
            remaining
            and self.max_candidates(self.episodes_left - reserve) >= len(remaining)
            and (len(remaining) > 1 or not hosts)
        ):
            max_episodes = 1 if decisive is not None else max(1, self.episodes_left // 2)
            measured = self._play_stage([schedules[i] for i in remaining], max_episodes)
            hosts = measured.shape[1]
            for i, row in zip(remaining, measured, strict=True):
                scores[i] += row.tolist()
            # All remaining candidates have met the same hosts in this race.
            remaining.sort(key=lambda i: -float(np.mean(scores[i])))
            if decisive is not None and hosts >= decisive * self.n_contexts:
                break
            survivors = -(-len(remaining) // self.reduction)
            remaining, eliminated = remaining[:survivors], remaining[survivors:] + eliminated
        return remaining + eliminated

    def _play_stage(
        self, schedules: Sequence[Schedule], max_episodes: int
    ) -> np.ndarray:  # [candidates, hosts] objective
        """Play all schedules on the same new hosts.

        Each schedule plays as many hosts per context as fit into `max_episodes` episodes of the pool, at least one.
        """
        n_envs = self.pool.n_envs
        hosts_per_context = max(1, max_episodes * n_envs // len(schedules) // self.n_contexts)
        if len(self.pool.env_factory.context_distribution.contexts) == 1:
            rng_seeds = episode_rng_seeds(self.rng_seed, TRAINING, self.episodes_spent, n_envs=hosts_per_context)
        else:
            rng_seeds = (
                sample_host_seeds(
                    self.pool,
                    hosts_per_context,
                    Random(f"{self.rng_seed} {self.episodes_spent}"),
                    contexts=self.contexts,
                )
                .ravel()
                .tolist()
            )
        self.played_schedules.update(schedules)
        cells = [(schedule, seed) for schedule in schedules for seed in rng_seeds]
        episodes = -(-len(cells) // n_envs)
        self.episodes_left -= episodes
        self.episodes_spent += episodes
        return np.array(play_cells(self.pool, cells)).reshape(len(schedules), -1)


def sample_host_seeds(
    pool: HostPool, number: int, rng: Random, *, contexts: Sequence[Context] | None = None
) -> np.ndarray:  # [M, number] int64
    """Return RNG seeds of `number` hosts of each given context (None: all). They are even, like those of training."""
    family = pool.env_factory.context_distribution
    rng_seeds: dict[str, list[int]] = {repr(member): [] for member in contexts or family.contexts}
    while min(map(len, rng_seeds.values())) < number:
        rng_seed = 2 * rng.randrange(2**60)
        rng_seeds.get(repr(family.draw(rng_seed)), []).append(rng_seed)
    return np.array([row[:number] for row in rng_seeds.values()])


def play_cells(pool: HostPool, cells: Sequence[tuple[Schedule, int]]) -> list[float]:
    """Return the final objective, on validation samples, of each schedule on the host with the given RNG seed.

    One episode of the pool is played per `pool.n_envs` pairs.
    """
    objectives: list[float] = []
    for start in range(0, len(cells), pool.n_envs):
        batch = cells[start : start + pool.n_envs]
        schedules, rng_seeds = zip(*batch, *[batch[0]] * (pool.n_envs - len(batch)), strict=True)
        objectives += final_objectives(pool, FixedSchedule(schedules), rng_seeds)[: len(batch)]
    return objectives


def final_objectives(pool: HostPool, controller: Controller, rng_seeds: Sequence[int]) -> list[float]:
    """Return the final objective, on validation samples, of each host after an episode of `controller`."""
    pool.reset(rng_seeds)
    controller.reset(pool)
    for _ in range(pool.config.horizon - 1):
        pool.step(controller.act(pool))
    return pool.step(controller.act(pool)).metrics.objective.tolist()
