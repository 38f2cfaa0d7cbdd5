"""Search for the best fixed schedule by successive halving on shared hosts, under a budget of environment steps.

Random plans are ranked first; then, repeatedly, the best ones together with their crossovers. In the end the winners of
all races and the schedules known beforehand are ranked together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple

from esper_lightning.controllers.fixed_schedule import FixedSchedule
from esper_lightning.controllers.schedule import Schedule, read_schedule
from esper_lightning.envs import HostPool
from esper_lightning.envs.context.distribution import PRICE_VARIABLE, Context
from esper_lightning.envs.seeding import EVALUATION, check_rng_seed, episode_rng_seeds
from esper_lightning.evaluation.play import paired_difference, play_episode
from esper_lightning.evaluation.search.plans import Plan, PlanSampler, latest_germinations
from esper_lightning.evaluation.search.successive_halving import SuccessiveHalving
from esper_lightning.evaluation.statistics import Interval, mean_interval
from esper_lightning.evaluation.work import run_all
from esper_lightning.parallel import Mapper

BEST_FILE, BEST_PRICE_PREFIX = "best_schedule", "best_schedule_price_"
"""File name of the best schedule, and prefix of the file names of the best schedule for each price."""

FINAL_EPISODES = 2
"""Episodes of the pool, per context, reserved for the last race: one for all winners, one for the best."""

WINNERS_PER_RACE = 3
"""Number of candidates of each race that enter the last one."""


MAX_STEPS = 100_000_000
"""Largest budget of a search. Its first candidates, a share of the budget, are in memory at once."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Budget and parameters of the search for the best fixed schedule."""

    steps: int = 17_280
    """Budget in environment steps (host epochs): for fairness as many as the learned controller had."""

    seed: int = 0
    """RNG seed of the candidates and of the hosts on which they are played."""

    max_seeds: int | None = None
    """Maximum number of seeds in a schedule, including culled ones. None: two per slot."""

    per_price: bool = False
    """Also search a schedule for each price in the family, with the same number of steps again, divided among prices.
    The price is the only variable that is known before the episode begins."""

    found: str | None = None
    """Folder with schedules found by an earlier comparison. They are played, and nothing is searched, whatever the
    other settings are."""

    explore: float = 0.13
    """Fraction of the budget for the first evaluation of random candidates, on one host per context."""

    one_in: int = 4
    """Reduction factor of each stage of a race: one of this many candidates survives."""

    decisive: int = 8
    """Hosts per context that decide a race: the stage in which every candidate plays as many is the last."""

    elites: int = 6
    """Best candidates of a race that enter the next one, together with their crossovers."""

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_STEPS:
            raise ValueError(f"search.steps must lie in 1 … {MAX_STEPS}, got {self.steps}")
        check_rng_seed("search.seed", self.seed)
        if self.max_seeds is not None and self.max_seeds < 1:
            raise ValueError(f"search.max_seeds must be at least 1, got {self.max_seeds}")
        if not 0.0 < self.explore <= 1.0:
            raise ValueError(f"search.explore must lie in (0, 1], got {self.explore}")
        for name, least in (("one_in", 2), ("decisive", 1), ("elites", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"search.{name} must be at least {least}, got {getattr(self, name)}")


class BestSchedules(NamedTuple):
    """Best fixed schedules, as far as they were searched."""

    fixed: Schedule | None
    """Best schedule for all hosts, or None if it was not searched."""
    per_price: dict[float, Schedule]
    """Best schedule for each price; empty if it was not searched."""

    def by_file(self) -> dict[str, Schedule]:
        """Return the schedules by file name without suffix."""
        named = {f"{BEST_PRICE_PREFIX}{price:g}": schedule for price, schedule in self.per_price.items()}
        return named if self.fixed is None else {BEST_FILE: self.fixed} | named


def read_best_schedules(folder: str | Path) -> BestSchedules:
    """Read schedules that an earlier comparison wrote. Raises ValueError, naming the file, if one cannot be read."""
    folder = Path(folder)
    files = sorted(folder.glob(f"{BEST_PRICE_PREFIX}*.json"))
    prices = {}
    for file in files:
        try:
            prices[float(file.stem.removeprefix(BEST_PRICE_PREFIX))] = read_schedule(file)
        except ValueError as error:
            raise ValueError(f"search.found: {error}") from error
    return BestSchedules(read_schedule(folder / f"{BEST_FILE}.json"), prices)


class SearchResult(NamedTuple):
    """Result of a search."""

    schedule: Schedule
    steps: int
    """Environment steps used by the search."""
    candidates: int
    """Number of distinct schedules that were played."""
    estimate: Interval
    """Objective on the test samples of fresh hosts, measured after the search and therefore free of selection bias."""
    lead: Interval | None
    """Lead over the runner-up, paired on the same hosts. None: there was no other candidate."""
    confirmation_steps: int
    """Environment steps of `estimate` and `lead`, which are not part of the search."""


def search(
    pool: HostPool,
    config: SearchConfig = SearchConfig(),
    known: Sequence[Schedule] = (),
    *,
    contexts: Sequence[Context] | None = None,
) -> SearchResult:
    """Search for the best fixed schedule on training hosts and their validation samples.

    The state of the pool is overwritten. Raises ValueError if the budget is too small for one host per context.

    Args:
        pool: The hosts.
        config: Budget and parameters.
        known: Schedules that enter the last race, whatever their origin, if the budget allows one.
        contexts: Contexts of the pool's distribution to search for. None: all.
    """
    searched_contexts = pool.env_factory.context_distribution.contexts if contexts is None else contexts
    check_steps(required_steps(len(searched_contexts), pool, pool.n_envs), config, pool.n_envs)
    episode = pool.n_envs * pool.config.horizon
    horizon = longest_horizon(pool, searched_contexts)
    sampler = PlanSampler(pool, config.seed, config.max_seeds, horizon=horizon)
    halving = SuccessiveHalving(
        pool, config.seed, episodes=config.steps // episode, reduction=config.one_in, contexts=contexts
    )
    winner, *others = (sampler.to_schedule(plan) for plan in find_winners(halving, sampler, config))
    # Ordered by priority: the last ones are dropped if the budget does not suffice to evaluate all.
    finalists = list(dict.fromkeys([winner, *known, *others]))
    if len(finalists) > 1 and halving.max_candidates(halving.episodes_left) > 1:
        finalists = [finalists[i] for i in halving.rank(finalists)]
    fresh_seeds = fresh_host_seeds(pool, config.seed, contexts)
    best, *runner_up = (
        play_episode(pool, str(i), FixedSchedule(schedule), rng_seeds=fresh_seeds)
        for i, schedule in enumerate(finalists[:2])
    )
    return SearchResult(
        schedule=finalists[0],
        steps=halving.steps,
        candidates=len(halving.played_schedules),
        estimate=mean_interval(best.objective),
        lead=paired_difference(best, runner_up[0]) if runner_up else None,
        confirmation_steps=(1 + len(runner_up)) * episode,
    )


def find_winners(halving: SuccessiveHalving, sampler: PlanSampler, config: SearchConfig) -> list[Plan]:
    """Race random plans, then repeatedly the best ones with their crossovers; return all winners, last race first.

    Enough budget remains for a race among all winners, if there is room for it.
    """
    episodes, n_envs = halving.episodes_left, halving.pool.n_envs
    reserved_episodes = min(FINAL_EPISODES * halving.n_contexts, max(FINAL_EPISODES, episodes // 4))
    reserved_episodes = reserved_episodes if halving.max_candidates(episodes - reserved_episodes) else 0
    tried: set[Plan] = set()

    def race(plans: list[Plan]) -> list[Plan]:
        tried.update(plans)
        schedules = [sampler.to_schedule(plan) for plan in plans]
        return [plans[i] for i in halving.rank(schedules, config.decisive, reserved_episodes)]

    n_random = max(1, halving.max_candidates(max(1, round(config.explore * episodes))))
    best = race(sampler.sample_distinct(n_random, tried))
    size = max(2, n_envs // 2)
    winners: list[Plan] = []
    while (n_candidates := min(size, halving.max_candidates(halving.episodes_left - reserved_episodes))) > 1:
        parents = best[: min(config.elites, n_candidates // 2)]
        winners = [*parents[:WINNERS_PER_RACE], *winners]
        children = sampler.sample_distinct(n_candidates - len(parents), tried, parents)
        best = race([*parents, *children])
    return list(dict.fromkeys([*best[:WINNERS_PER_RACE], *winners]))[: max(2, n_envs // config.decisive)]


def fresh_host_seeds(pool: HostPool, rng_seed: int, contexts: Sequence[Context] | None) -> list[int]:
    """Return RNG seeds of `pool.n_envs` hosts of the given contexts that no search and no comparison uses.

    Episode 0 is left out because the policy is evaluated on it.
    """
    drawn = chain.from_iterable(
        episode_rng_seeds(rng_seed, EVALUATION, episode, n_envs=pool.n_envs) for episode in count(1)
    )
    matching = (
        host_seed
        for host_seed in drawn
        if contexts is None or pool.env_factory.context_distribution.draw(host_seed) in contexts
    )
    return list(islice(matching, pool.n_envs))


def longest_horizon(pool: HostPool, contexts: Sequence[Context]) -> int:
    """Return the number of ticks of the longest episode in any of the contexts."""
    return max(context.horizon or pool.config.horizon for context in contexts)


def price_of(context: Context, pool: HostPool) -> float:
    """Return the price of parameters in this context."""
    return pool.config.objective.price if context.price is None else context.price


def contexts_by_price(pool: HostPool) -> dict[float, list[Context]]:
    """Return the contexts of the pool's distribution by their price of parameters, the lowest first.

    Raises ValueError if there is only one price, or if every host has its own.
    """
    if pool.config.objective.price_to is not None:
        raise ValueError(
            f"search.per_price: every host has a price of its own; leave out objective.price_to and name some in "
            f"data.env.family, as {PRICE_VARIABLE}"
        )
    groups: dict[float, list[Context]] = {}
    for context in pool.env_factory.context_distribution.contexts:
        groups.setdefault(price_of(context, pool), []).append(context)
    if len(groups) < 2:
        raise ValueError(
            f"search.per_price: all hosts have one price; name several in data.env.family, as {PRICE_VARIABLE}"
        )
    return dict(sorted(groups.items()))


def required_steps(n_contexts: int, pool: HostPool, n_envs: int) -> int:
    """Return the environment steps needed to play one schedule on one host of each of `n_contexts` contexts."""
    return -(-n_contexts // n_envs) * n_envs * pool.config.horizon


def check_budget(config: SearchConfig, pool: HostPool, n_envs: int) -> None:
    """Raise ValueError if the budget is too small to play one schedule on one host per context.

    The same happens if episodes are too short for a seed. With `per_price` all this must hold for the search for each
    price. A search runs `n_envs` environments side by side.
    """
    contexts = pool.env_factory.context_distribution.contexts
    groups_by_setting = {"steps": [contexts]}
    if config.per_price:
        groups_by_setting["per_price"] = list(contexts_by_price(pool).values())
    for groups in groups_by_setting.values():
        largest = max(len(group) for group in groups)
        steps = len(groups) * required_steps(largest, pool, n_envs)
        check_steps(steps, config, n_envs, searches=len(groups))
        for group in groups:
            latest_germinations(pool.config, longest_horizon(pool, group))  # raises ValueError if there is none


def check_steps(min_steps: int, config: SearchConfig, n_envs: int, *, searches: int = 1) -> None:
    """Raise ValueError if the budget is smaller than the `min_steps` that all searches together need."""
    if config.steps < min_steps:
        raise ValueError(
            f"search.steps is {config.steps}; to see one schedule on a host of each context, {n_envs} hosts side by "
            f"side, takes {min_steps}" + (f", for {searches} prices apart" if searches > 1 else "")
        )


def search_best_schedules(
    pool: HostPool,
    config: SearchConfig,
    known: Sequence[Schedule] = (),
    *,
    fixed: bool = True,
    per_price: bool = True,
    executor: Mapper | None = None,
) -> BestSchedules:
    """Return the best schedule for all hosts, and the best one for each price.

    Args:
        pool: The hosts; their state is overwritten.
        config: Budget and parameters. The searches for single prices share a second budget of as many steps.
        known: Schedules that enter the last race of each search.
        fixed: Search the schedule for all hosts.
        per_price: Search one for each price.
        executor: Has a method `map(function, items)`, which runs the searches. None: one after the other.

    Raises ValueError if all contexts have the same price, and one for each is to be searched.
    """
    groups = contexts_by_price(pool) if per_price else {}
    share = replace(config, steps=config.steps // max(1, len(groups)))
    found = run_all(
        {
            BEST_FILE: [partial(search, pool, config, known)] if fixed else [],
            BEST_PRICE_PREFIX: [partial(search, pool, share, known, contexts=own) for own in groups.values()],
        },
        executor,
    )
    best = [result.schedule for result in found[BEST_FILE]]
    schedules = [result.schedule for result in found[BEST_PRICE_PREFIX]]
    return BestSchedules(best[0] if best else None, dict(zip(groups, schedules, strict=True)))
