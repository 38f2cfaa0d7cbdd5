"""Search for the best fixed schedule on training hosts, under a budget of environment steps.

The first race is one of random schedules, the next ones of the best so far and their crossovers, and the last one of
the winners and schedules known before. All schedules of a race meet the same hosts, so the hosts' luck cancels, and
equally many hosts of each context, because the best schedule for one context says little about the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from random import Random

import numpy as np

from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.rules import min_ticks_to_judge
from esper_lightning.controllers.schedules import FixedSchedule, Schedule, ScheduledAction
from esper_lightning.envs import EnvConfig, HostPool
from esper_lightning.envs.family import Context
from esper_lightning.envs.vector_env import check_rng_seed

CULL_PROBABILITY = 1 / 3
"""Probability that a sampled seed is culled."""

FIRST_SHARE, LAST_SHARE = 1 / 8, 1 / 4
"""Shares of the budget for the first host per context of each random schedule, and for the last race."""

ONE_IN = 4
"""One schedule of so many goes on to further hosts in a race."""

DECISIVE = 8
"""Hosts per context that decide a race."""

PARENTS, FINALISTS = 6, 8
"""Best schedules of a race that enter the next one, with their crossovers, and winners that enter the last one."""

SeedLife = tuple[ScheduledAction, ...]
"""Germination of a seed, then CULL or FOSSILIZE, in one slot; empty: no seed grows there."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Budget of the search for the best fixed schedule."""

    steps: int = 17_280
    """Budget in environment steps (host epochs): for fairness as many as the learned controller had."""

    seed: int = 0
    """RNG seed of the candidates and of the hosts on which they are played."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"search.steps must be at least 1, got {self.steps}")
        check_rng_seed("search.seed", self.seed)


def search(
    pool: HostPool,
    config: SearchConfig = SearchConfig(),
    known: Sequence[Schedule] = (),
    *,
    contexts: Sequence[Context] | None = None,
) -> Schedule:
    """Return the best fixed schedule on training hosts and their validation samples. The pool's state is overwritten.

    `known` schedules enter the last race if the budget allows one. Hosts are of these `contexts` of the pool's
    distribution; None: of all.
    """
    contexts = contexts or pool.env_factory.context_distribution.contexts
    horizon = max(context.horizon or pool.config.horizon for context in contexts)
    sampler = ScheduleSampler(pool, config.seed, horizon=horizon)
    episodes = config.steps // (pool.n_envs * pool.config.horizon)  # of the whole pool
    racing = Racing(pool, config.seed, contexts, episodes=episodes)
    reserve = round(LAST_SHARE * episodes)
    first_race = max(1, round(FIRST_SHARE * episodes))
    ranked = racing.rank(sampler.fill([], max(1, racing.affordable(episodes - first_race))), reserve)
    winners = ranked[:FINALISTS]
    while (number := min(pool.n_envs // 2, racing.affordable(reserve))) > 1:
        parents = ranked[: min(PARENTS, number // 2)]
        ranked = racing.rank(sampler.fill(parents, number), reserve)
        winners = [ranked[0], *(schedule for schedule in winners if schedule != ranked[0])][:FINALISTS]
    finalists = dict.fromkeys([winners[0], *known, *winners])  # each once; the last ones may not fit the budget
    return racing.best(list(finalists))


class Racing:
    """Plays schedules on hosts of `contexts`, within a budget of `episodes` of the whole pool."""

    def __init__(self, pool: HostPool, rng_seed: int, contexts: Sequence[Context], *, episodes: int) -> None:
        self.pool, self.contexts, self.episodes_left = pool, contexts, episodes
        self.random = Random(f"hosts {rng_seed}")

    def affordable(self, reserve: int = 0) -> int:
        """Return how many schedules can each play one host per context, if `reserve` episodes are to remain."""
        return max(0, self.episodes_left - reserve) * self.pool.n_envs // len(self.contexts)

    def rank(self, schedules: Sequence[Schedule], reserve: int) -> list[Schedule]:
        """Return schedules from best to worst. If the budget does not suffice for all, the last ones are left out.

        The leading ones meet further hosts, until these decide, or no more than `reserve` episodes are left.
        """
        ranked = list(schedules[: max(1, self.affordable(reserve))])
        scores: dict[Schedule, list[float]] = {schedule: [] for schedule in ranked}
        n_leading, hosts_met = len(ranked), 0  # hosts per context that the leading schedules have met
        while hosts_met < DECISIVE and n_leading <= self.affordable(reserve) and (n_leading > 1 or hosts_met == 0):
            leading, hosts = ranked[:n_leading], max(1, self.pool.n_envs // (n_leading * len(self.contexts)))
            for schedule, objectives in zip(leading, self.play(leading, hosts), strict=True):
                scores[schedule] += objectives.tolist()
            ranked[:n_leading] = sorted(leading, key=lambda schedule: -float(np.mean(scores[schedule])))
            n_leading, hosts_met = -(-n_leading // ONE_IN), hosts_met + hosts  # rounded up
        return ranked

    def best(self, schedules: Sequence[Schedule]) -> Schedule:
        """Return the best schedule on as many hosts as the budget still allows; without any, the first schedule."""
        affordable = self.affordable()
        schedules = schedules[: max(1, affordable)]
        if len(schedules) == 1:
            return schedules[0]
        objectives = self.play(schedules, affordable // len(schedules))
        return schedules[int(objectives.mean(1).argmax())]

    def play(self, schedules: Sequence[Schedule], hosts: int) -> np.ndarray:  # [schedules, contexts · hosts]
        """Return the objectives of schedules that all meet the same new hosts, so many of each context."""
        rng_seeds = sample_host_seeds(self.pool, hosts, self.random, contexts=self.contexts).ravel().tolist()
        games = [(schedule, rng_seed) for schedule in schedules for rng_seed in rng_seeds]
        objectives: list[float] = []
        n_envs = self.pool.n_envs
        for start in range(0, len(games), n_envs):  # one episode of the pool each
            batch = games[start : start + n_envs]
            filled = batch + batch[:1] * (n_envs - len(batch))  # every host of the pool must play something
            played, seeds = zip(*filled, strict=True)
            objectives += final_objectives(self.pool, FixedSchedule(played), seeds)[: len(batch)]
            self.episodes_left -= 1
        return np.array(objectives).reshape(len(schedules), -1)


def sample_host_seeds(
    pool: HostPool, number: int, rng: Random, *, contexts: Sequence[Context] | None = None
) -> np.ndarray:  # [contexts, number] int64
    """Return RNG seeds of `number` hosts of each given context (None: all). They are even, like those of training."""
    family = pool.env_factory.context_distribution
    rng_seeds: dict[str, list[int]] = {repr(context): [] for context in contexts or family.contexts}
    while min(map(len, rng_seeds.values())) < number:
        rng_seed = 2 * rng.randrange(2**60)
        context = repr(family.draw(rng_seed))
        if context in rng_seeds:
            rng_seeds[context].append(rng_seed)
    return np.array([of_context[:number] for of_context in rng_seeds.values()])


def final_objectives(pool: HostPool, controller: Controller, rng_seeds: Sequence[int]) -> list[float]:
    """Return the final objective, on validation samples, of each host after an episode of `controller`."""
    pool.reset(rng_seeds)
    controller.reset(pool)
    steps = [pool.step(controller.act(pool)) for _ in range(pool.config.horizon)]
    return steps[-1].metrics.objective.tolist()


def check_budget(config: SearchConfig, pool: HostPool, n_envs: int) -> None:
    """Raise ValueError if the budget is too small to play one schedule on one host per context, or episodes too short.

    A search runs `n_envs` environments side by side.
    """
    contexts = pool.env_factory.context_distribution.contexts
    least = -(-len(contexts) // n_envs) * n_envs * pool.config.horizon  # whole episodes of the pool, rounded up
    if config.steps < least:
        raise ValueError(
            f"search.steps is {config.steps}; to see one schedule on a host of each context, {n_envs} hosts side by "
            f"side, takes {least}"
        )
    horizon = max(context.horizon or pool.config.horizon for context in contexts)
    latest_germinations(pool.config, horizon)  # raises ValueError if there is none


def latest_germinations(config: EnvConfig, horizon: int) -> dict[str, int]:
    """Return the last tick of each tempo in which a seed that germinates can still be fossilized.

    Tempos without such a tick are left out. Raises ValueError if there is none at all.
    """
    last = {name: horizon - 1 - min_ticks_to_judge(config.lifecycle, n) for name, n in config.actions.tempos.items()}
    possible = {tempo: tick for tempo, tick in last.items() if tick >= 0}
    if not possible:
        raise ValueError(
            f"search: no seed can be fossilized in episodes of {horizon} ticks; raise env.horizon, or the horizons in "
            f"env.family"
        )
    return possible


class ScheduleSampler:
    """Samples schedules of 1 … K seeds in as many slots, each culled or fossilized, for episodes of `horizon` ticks.

    All choices are uniformly distributed, except that early ticks and fossilization are likelier.
    """

    def __init__(self, pool: HostPool, rng_seed: int, *, horizon: int) -> None:
        self.random, self.space, self.horizon = Random(rng_seed), pool.space, horizon
        rows = zip(pool.space.slot, pool.growable.tolist(), strict=True)
        # Names of the blueprints that can grow in each slot that takes one.
        self.growable = {slot: list(compress(pool.space.blueprint, row)) for slot, row in rows if any(row)}
        self.latest_germination = latest_germinations(pool.config, horizon)

    def draw(self) -> Schedule:
        slots = self.random.sample(list(self.growable), self.random.randint(1, len(self.growable)))
        return self._schedule([self._draw_seed(slot) for slot in slots])

    def crossover(self, first: Schedule, second: Schedule) -> Schedule:
        """Return a schedule with the seed of either parent in each slot; at random one seed is changed."""
        changed_slot, seeds = self.random.choice([None, *self.growable]), []
        for slot in self.growable:
            parent = self.random.choice([first, second])
            seed = tuple(entry for entry in parent.entries if entry.slot == slot)
            seeds.append(self._change_seed(slot, seed) if slot == changed_slot else seed)
        return self._schedule(seeds) if any(seeds) else self.draw()

    def fill(self, schedules: Sequence[Schedule], number: int) -> list[Schedule]:
        """Return up to `number` different schedules: these and crossovers of them, or random ones if there are none."""
        filled = list(schedules)
        for _ in range(20 * number):
            new = self.crossover(*self.random.choices(schedules, k=2)) if schedules else self.draw()
            if len(filled) < number and new not in filled:
                filled.append(new)
        return filled

    def _draw_seed(self, slot: str) -> SeedLife:
        """Return germination and end of a random seed in a slot."""
        tempo = self.random.choice(list(self.latest_germination))
        # Early ticks are likelier: a seed that germinates earlier learns for longer.
        tick = min(self.random.randint(0, self.latest_germination[tempo]) for _ in range(2))
        germination = ScheduledAction(tick, "GERMINATE", slot, self.random.choice(self.growable[slot]), tempo)
        op = "CULL" if self.random.random() < CULL_PROBABILITY else "FOSSILIZE"
        # An entry stays due until it is possible.
        as_soon_as_possible = op == "FOSSILIZE" and self.random.choice([True, False])
        end_tick = tick + 1 if as_soon_as_possible else self.random.randint(tick + 1, self.horizon - 1)
        return germination, ScheduledAction(end_tick, op, slot)

    def _change_seed(self, slot: str, seed: SeedLife) -> SeedLife:
        """Return a new seed, none, or the given one with another end or another choice at its germination."""
        new = self._draw_seed(slot)
        if not seed:
            return new
        (germination, end), (new_germination, new_end) = seed, new
        name = self.random.choice(["blueprint", "tempo", "tick"])
        changed = germination._replace(**{name: getattr(new_germination, name)})
        varied = self.random.choice([(), new, (germination, new_end), (changed, end)])
        if not varied:
            return ()
        # Germination must leave time to judge the seed, and must come before its end.
        latest = min(self.latest_germination[str(varied[0].tempo)], varied[1].tick - 1)
        return varied if varied[0].tick <= latest else new

    def _schedule(self, seeds: Sequence[SeedLife]) -> Schedule:
        """Return a schedule of seeds; if several actions are due, germinations come last."""
        entries = [entry for seed in seeds for entry in seed]
        entries.sort(key=lambda entry: (entry.tick, entry.op == "GERMINATE", self.space.slot.index(entry.slot)))
        return Schedule(tuple(self.space.slot), tuple(entries))
