"""Search for the best fixed schedule by successive halving on training hosts, under a budget of environment steps.

Random plans are ranked first; then, repeatedly, the best ones together with their crossovers. In the end the winners of
all races and the schedules known beforehand are ranked together. All candidates of a race meet the same hosts, so the
hosts' luck cancels, and equally many hosts of each context, because the best schedule for one context says little about
the others.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.rules import min_ticks_to_judge
from esper_lightning.controllers.schedules import FixedSchedule, Schedule, ScheduledAction, read_schedule
from esper_lightning.envs import EnvConfig, HostPool
from esper_lightning.envs.family import PRICE, Context
from esper_lightning.envs.seeding import TRAINING, check_rng_seed, episode_rng_seeds
from esper_lightning.parallel import run_all

BEST_FILE, BEST_PRICE_PREFIX = "best_schedule", "best_schedule_price_"
"""File name of the best schedule, and prefix of the file names of the best schedule for each price."""

CULL_PROBABILITY = 1 / 3
"""Probability that a sampled seed is culled."""


EXPLORE = 0.13
"""Fraction of the budget for the first evaluation of random candidates, on one host per context."""

ONE_IN = 4
"""Reduction factor of each stage of a race: one of this many candidates survives."""

DECISIVE = 8
"""Hosts per context that decide a race: the stage in which every candidate plays as many is the last."""

ELITES, WINNERS_PER_RACE = 6, 3
"""Best candidates of a race that enter the next one, with their crossovers, and that enter the last one."""

FINAL_EPISODES = 2
"""Episodes of the pool, per context, reserved for the last race: one for all winners, one for the best."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Budget of the search for the best fixed schedule."""

    steps: int = 17_280
    """Budget in environment steps (host epochs): for fairness as many as the learned controller had."""

    seed: int = 0
    """RNG seed of the candidates and of the hosts on which they are played."""

    per_price: bool = False
    """Also search a schedule for each price in the family, with the same number of steps again, divided among prices.
    The price is the only variable that is known before the episode begins."""

    found: str | None = None
    """Folder with schedules found by an earlier comparison. They are played, and nothing is searched."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"search.steps must be at least 1, got {self.steps}")
        check_rng_seed("search.seed", self.seed)


def read_best_schedules(folder: str | Path) -> dict[str, Schedule]:
    """Read schedules that an earlier comparison wrote, by file name. Raises ValueError if one cannot be read."""
    files = [Path(folder) / f"{BEST_FILE}.json", *sorted(Path(folder).glob(f"{BEST_PRICE_PREFIX}*.json"))]
    return {file.name.removesuffix(".json"): read_schedule(file) for file in files}


def search_best_schedules(
    pool: HostPool,
    config: SearchConfig,
    known: Sequence[Schedule] = (),
    *,
    fixed: bool = True,
    executor: ProcessPoolExecutor | None = None,
) -> dict[str, Schedule]:
    """Return the best schedule for all hosts (if `fixed`), and with `per_price` the best for each price, by file name.

    The state of the hosts is overwritten. `known` schedules enter the last race of each search. The searches for single
    prices share a second budget of as many steps. An `executor` runs the searches side by side.
    """
    groups = contexts_by_price(pool) if config.per_price else {}
    share = replace(config, steps=config.steps // max(1, len(groups)))
    searches = {BEST_FILE: [partial(search, pool, config, known)]} if fixed else {}
    for price, contexts in groups.items():
        searches[f"{BEST_PRICE_PREFIX}{price:g}"] = [partial(search, pool, share, known, contexts=contexts)]
    return {name: found for name, (found,) in run_all(searches, executor).items()}


def search(
    pool: HostPool,
    config: SearchConfig = SearchConfig(),
    known: Sequence[Schedule] = (),
    *,
    contexts: Sequence[Context] | None = None,
) -> Schedule:
    """Return the best fixed schedule on training hosts and their validation samples. The pool's state is overwritten.

    `known` schedules enter the last race, whatever their origin, if the budget allows one; see `check_budget`.
    `contexts` of the pool's distribution are searched for; None: all.
    """
    searched = pool.env_factory.context_distribution.contexts if contexts is None else contexts
    sampler = PlanSampler(pool, config.seed, horizon=longest_horizon(pool, searched))
    episodes = config.steps // (pool.n_envs * pool.config.horizon)
    halving = SuccessiveHalving(pool, config.seed, searched, episodes)
    reserved = min(FINAL_EPISODES * len(searched), max(FINAL_EPISODES, episodes // 4))  # for the last race,
    reserved = reserved if halving.max_candidates(reserved) else 0  # unless nothing would be left for the first
    tried: set[Plan] = set()

    def race(plans: list[Plan]) -> list[Plan]:
        tried.update(plans)
        return [plans[i] for i in halving.rank([sampler.to_schedule(plan) for plan in plans], DECISIVE, reserved)]

    n_random = max(1, halving.max_candidates(episodes - max(1, round(EXPLORE * episodes))))
    best = race(sampler.sample_distinct(n_random, tried))
    winners: list[Plan] = []  # those of the last race first
    while (n_candidates := min(max(2, pool.n_envs // 2), halving.max_candidates(reserved))) > 1:
        parents = best[: min(ELITES, n_candidates // 2)]
        winners = [*parents[:WINNERS_PER_RACE], *winners]
        best = race([*parents, *sampler.sample_distinct(n_candidates - len(parents), tried, parents)])
    winners = list(dict.fromkeys([*best[:WINNERS_PER_RACE], *winners]))[: max(2, pool.n_envs // DECISIVE)]

    first, *others = (sampler.to_schedule(plan) for plan in winners)
    # Ordered by priority: the last ones are dropped if the budget does not suffice to evaluate all.
    finalists = list(dict.fromkeys([first, *known, *others]))
    is_contested = len(finalists) > 1 and halving.max_candidates() > 1
    return finalists[halving.rank(finalists)[0]] if is_contested else first


class SuccessiveHalving:
    """Ranks schedules on the same few hosts, the better ones on further hosts, and so on.

    The pool plays one or more episodes per stage, with hosts drawn from `contexts`; the budget is in such `episodes`.
    """

    def __init__(self, pool: HostPool, rng_seed: int, contexts: Sequence[Context], episodes: int) -> None:
        self.pool, self.rng_seed, self.contexts = pool, rng_seed, contexts
        self.episodes_left, self.episodes_spent = episodes, 0

    def max_candidates(self, reserve: int = 0) -> int:
        """Return how many candidates can each play one host per context, if `reserve` episodes are to remain."""
        return max(0, self.episodes_left - reserve) * self.pool.n_envs // len(self.contexts)

    def rank(self, schedules: Sequence[Schedule], decisive: int | None = None, reserve: int = 0) -> list[int]:
        """Return the indices of the schedules from best to worst; a schedule that reaches a later stage ranks higher.

        If the budget does not allow one host per context for every schedule, the last ones are left out. `decisive` are
        the hosts per context of the last stage; None: stages continue until about two candidates are left, and each may
        use half of the remaining budget. `reserve` episodes of the budget must remain.
        """
        remaining = list(range(len(schedules)))[: self.max_candidates(reserve)]
        scores: dict[int, list[float]] = {i: [] for i in remaining}
        eliminated: list[int] = []
        hosts = 0
        while remaining and self.max_candidates(reserve) >= len(remaining) and (len(remaining) > 1 or not hosts):
            max_episodes = 1 if decisive is not None else max(1, self.episodes_left // 2)
            measured = self.play_stage([schedules[i] for i in remaining], max_episodes)
            hosts = measured.shape[1]
            for i, row in zip(remaining, measured, strict=True):
                scores[i] += row.tolist()
            # All remaining candidates have met the same hosts in this race.
            remaining.sort(key=lambda i: -float(np.mean(scores[i])))
            if decisive is not None and hosts >= decisive * len(self.contexts):
                break
            survivors = -(-len(remaining) // ONE_IN)
            remaining, eliminated = remaining[:survivors], remaining[survivors:] + eliminated
        return remaining + eliminated

    def play_stage(self, schedules: Sequence[Schedule], max_episodes: int) -> np.ndarray:  # [candidates, hosts]
        """Return the objectives of all schedules on the same new hosts.

        Each schedule plays as many hosts per context as fit into `max_episodes` episodes of the pool, at least one.
        """
        n_envs = self.pool.n_envs
        each = max(1, max_episodes * n_envs // len(schedules) // len(self.contexts))
        if len(self.pool.env_factory.context_distribution.contexts) == 1:
            rng_seeds = episode_rng_seeds(self.rng_seed, TRAINING, self.episodes_spent, n_envs=each)
        else:
            random = Random(f"{self.rng_seed} {self.episodes_spent}")
            rng_seeds = sample_host_seeds(self.pool, each, random, contexts=self.contexts).ravel().tolist()
        cells = [(schedule, seed) for schedule in schedules for seed in rng_seeds]
        objectives: list[float] = []
        for start in range(0, len(cells), n_envs):  # one episode of the pool each, the last one filled up
            batch = cells[start : start + n_envs]
            played, seeds = zip(*batch, *[batch[0]] * (n_envs - len(batch)), strict=True)
            objectives += final_objectives(self.pool, FixedSchedule(played), seeds)[: len(batch)]
            self.episodes_left -= 1
            self.episodes_spent += 1
        return np.array(objectives).reshape(len(schedules), -1)


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


def final_objectives(pool: HostPool, controller: Controller, rng_seeds: Sequence[int]) -> list[float]:
    """Return the final objective, on validation samples, of each host after an episode of `controller`."""
    pool.reset(rng_seeds)
    controller.reset(pool)
    steps = [pool.step(controller.act(pool)) for _ in range(pool.config.horizon)]
    return steps[-1].metrics.objective.tolist()


def longest_horizon(pool: HostPool, contexts: Sequence[Context]) -> int:
    """Return the number of ticks of the longest episode in any of the contexts."""
    return max(context.horizon or pool.config.horizon for context in contexts)


def contexts_by_price(pool: HostPool) -> dict[float, list[Context]]:
    """Return the contexts of the pool's distribution by their price of parameters, the lowest first.

    Raises ValueError if there is only one price.
    """
    objective = pool.config.objective
    groups: dict[float, list[Context]] = {}
    for context in pool.env_factory.context_distribution.contexts:
        groups.setdefault(objective.price if context.price is None else context.price, []).append(context)
    if len(groups) < 2:
        raise ValueError(f"search.per_price: all hosts have one price; name several in data.env.family, as {PRICE}")
    return dict(sorted(groups.items()))


def check_budget(config: SearchConfig, pool: HostPool, n_envs: int) -> None:
    """Raise ValueError if the budget is too small to play one schedule on one host per context, or episodes too short.

    With `per_price` this must hold for the search for each price. A search runs `n_envs` environments side by side.
    """
    everything = [pool.env_factory.context_distribution.contexts]
    for groups in [everything, list(contexts_by_price(pool).values())] if config.per_price else [everything]:
        least = len(groups) * -(-max(map(len, groups)) // n_envs) * n_envs * pool.config.horizon
        if config.steps < least:
            raise ValueError(
                f"search.steps is {config.steps}; to see one schedule on a host of each context, {n_envs} hosts side "
                f"by side, takes {least}" + (f", for {len(groups)} prices apart" if len(groups) > 1 else "")
            )
        for group in groups:
            latest_germinations(pool.config, longest_horizon(pool, group))  # raises ValueError if there is none


class PlannedSeed(NamedTuple):
    """One seed of a plan. A culled one helps the host to learn and costs no parameters at the end."""

    slot: str
    blueprint: str
    tempo: str
    tick: int  # of the germination
    cull_tick: int | None = None  # None: it is fossilized


class Plan(NamedTuple):
    """Seeds of one host, ordered by slot and tick. Only the last seed in a slot may be fossilized."""

    seeds: tuple[PlannedSeed, ...]
    fossilize_late: bool  # in the last ticks of the episode, not each as soon as possible


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


class PlanSampler:
    """Samples plans with 1 … K seeds in as many slots, for episodes of `horizon` ticks (None: those of the pool).

    All choices are uniformly distributed, except that early ticks and fossilization are more likely. Mutated plans and
    crossovers may have several seeds in a slot, one after the other, and up to two per slot together.
    """

    def __init__(self, pool: HostPool, rng_seed: int, *, horizon: int | None = None) -> None:
        self.random = Random(rng_seed)
        self.space, self.config = pool.space, pool.config
        self.horizon = pool.config.horizon if horizon is None else horizon
        self.growable = {
            slot: [name for name, grows in zip(pool.space.blueprint, row, strict=True) if grows]
            for slot, row in zip(pool.space.slot, pool.growable.tolist(), strict=True)
        }
        self.slots = [slot for slot in pool.space.slot if self.growable[slot]]
        self.max_slots = len(self.slots)
        self.max_seeds = 2 * len(self.slots)
        self.latest_germination = latest_germinations(pool.config, self.horizon)
        self.tempos = list(self.latest_germination)

    def draw(self) -> Plan:
        """Return a random plan."""
        chosen = self.random.sample(self.slots, self.random.randint(1, self.max_slots))
        return self._make_plan([self._sample_seed(slot) for slot in chosen], self._coin_flip())

    def crossover(self, one: Plan, other: Plan) -> Plan:
        """Return a plan in which each slot has the seeds of one parent, chosen at random; half of them are mutated."""
        seeds = []
        for slot in self.slots:
            seeds += [seed for seed in (one, other)[self._coin_flip()].seeds if seed.slot == slot]
        if not 1 <= len(seeds) <= self.max_seeds or len({seed.slot for seed in seeds}) > self.max_slots:
            return self.mutate(one)
        plan = self._make_plan(seeds, (one, other)[self._coin_flip()].fossilize_late)
        return self.mutate(plan) if self._coin_flip() or plan in (one, other) else plan

    def mutate(self, plan: Plan) -> Plan:
        """Return the plan with one random change, and whatever adjustments of ticks it requires.

        The change concerns one choice of a seed, its culling, its slot, an added or removed seed, or `fossilize_late`.
        """
        seeds = list(plan.seeds)
        moves = ["blueprint", "tick", "cull_tick", "slot", "fossilize_late"]
        moves += ["tempo"] * (len(self.tempos) > 1)
        moves += ["more"] * (len(seeds) < self.max_seeds) + ["less"] * (len(seeds) > 1)
        move, i = self.random.choice(moves), self.random.randrange(len(seeds))
        if move == "fossilize_late":
            return plan._replace(fossilize_late=not plan.fossilize_late)
        if move in ("less", "slot"):
            del seeds[i]
        if move in ("more", "slot"):
            seeds.append(self._sample_seed(self._sample_slot(seeds)))
        elif move == "cull_tick":
            uncull = seeds[i].cull_tick is not None and self._coin_flip()
            seeds[i] = seeds[i]._replace(cull_tick=None if uncull else self._sample_cull_tick(seeds[i].tick))
        elif move != "less":
            other = self._sample_seed(seeds[i].slot)
            changed = seeds[i]._replace(**{move: getattr(other, move)})
            tick = min(changed.tick, self.latest_germination[changed.tempo])
            is_cull_too_early = changed.cull_tick is not None and changed.cull_tick <= tick
            cull_tick = self._sample_cull_tick(tick) if is_cull_too_early else changed.cull_tick
            seeds[i] = changed._replace(tick=tick, cull_tick=cull_tick)
        return self._make_plan(seeds, plan.fossilize_late)

    def sample_distinct(self, number: int, known: AbstractSet[Plan], parents: Sequence[Plan] = ()) -> list[Plan]:
        """Return up to `number` plans not in `known`, fewer if they are hard to find.

        They are crossovers of `parents`, or random plans without parents.
        """
        plans: dict[Plan, None] = {}
        for _ in range(20 * number):
            plan = self.crossover(*self.random.choices(parents, k=2)) if parents else self.draw()
            if plan not in known:
                plans[plan] = None
            if len(plans) == number:
                break
        return list(plans)

    def _coin_flip(self) -> bool:
        return self.random.random() < 0.5

    def _sample_seed(self, slot: str) -> PlannedSeed:
        choose = self.random.choice
        tempo = choose(self.tempos)
        # Early ticks are more likely: a seed that germinates earlier learns for longer.
        tick = min(self.random.randint(0, self.latest_germination[tempo]) for _ in range(2))
        culled = self._sample_cull_tick(tick) if self.random.random() < CULL_PROBABILITY else None
        blueprint = choose(self.growable[slot])
        choose([None])  # a draw without effect, so that searches find the schedules that they found before
        return PlannedSeed(slot, blueprint, tempo, tick, culled)

    def _sample_cull_tick(self, tick: int) -> int:
        return self.random.randint(tick + 1, self.horizon - 1)

    def _sample_slot(self, seeds: Sequence[PlannedSeed]) -> str:
        used = {seed.slot for seed in seeds}
        return self.random.choice(self.slots if len(used) < self.max_slots else [s for s in self.slots if s in used])

    def _make_plan(self, seeds: list[PlannedSeed], late: bool) -> Plan:
        """Return a plan with ordered seeds: a seed is culled in time for the next one in its slot.

        The next one germinates when the slot is open again. It is dropped if no time is left for it.
        """
        reopening = 1 + self.config.lifecycle.embargo_ticks  # ticks from a cull to the next germination in the slot
        ordered: list[PlannedSeed] = []
        for slot in self.slots:
            in_slot: list[PlannedSeed] = []
            for seed in sorted((seed for seed in seeds if seed.slot == slot), key=lambda seed: seed.tick):
                if not in_slot:
                    in_slot.append(seed)
                    continue
                last = in_slot[-1]
                culled = max(last.tick + 1, min(last.cull_tick or seed.tick, seed.tick))
                tick = max(seed.tick, culled + reopening)
                if tick <= self.latest_germination[seed.tempo] and (seed.cull_tick is None or tick < seed.cull_tick):
                    in_slot[-1:] = [last._replace(cull_tick=culled), seed._replace(tick=tick)]
            ordered += in_slot
        return Plan(tuple(ordered), late)

    def to_schedule(self, plan: Plan) -> Schedule:
        """Return the plan as a schedule: if several actions are due, germinations come last."""
        fossilized = [seed for seed in plan.seeds if seed.cull_tick is None]
        entries = []
        for seed in plan.seeds:
            entries.append(ScheduledAction(seed.tick, "GERMINATE", *seed[:3]))
            if seed.cull_tick is not None:
                entries.append(ScheduledAction(seed.cull_tick, "CULL", seed.slot))
                continue
            # Two ticks per fossilized seed are reserved at the end, in case a seed cannot be fossilized at once.
            end = self.horizon - 2 * len(fossilized) + fossilized.index(seed) if plan.fossilize_late else 0
            entries.append(ScheduledAction(max(end, seed.tick + 1), "FOSSILIZE", seed.slot))
        entries.sort(key=lambda entry: (entry.tick, entry.op == "GERMINATE"))
        return Schedule(tuple(self.space.slot), tuple(entries))
