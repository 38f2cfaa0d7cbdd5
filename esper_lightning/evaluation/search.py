"""The best fixed schedule: candidates raced on shared hosts, under a budget of environment steps.

Random plans are raced first; then, again and again, the best ones against their children; in the end the winners of
all races against each other, and against schedules that are known already.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple

from esper_lightning.envs import HostPool
from esper_lightning.envs.family import PRICE, Member
from esper_lightning.evaluation.compare import paired_difference, play
from esper_lightning.evaluation.intervals import Interval, mean_interval
from esper_lightning.evaluation.plans import Generator, Plan
from esper_lightning.evaluation.race import Racer
from esper_lightning.rollout import EVALUATION, episode_seeds
from esper_lightning.tamiyo.replay import FixedSchedule
from esper_lightning.tamiyo.schedule import Schedule, read_schedule

BEST_FILE, PRICED = "best_schedule", "best_schedule_price_"
"""Names of the files of what was found; a price follows the second."""

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
    """Most seeds in a schedule, those that are culled counted in. None: two for each slot."""

    per_price: bool = False
    """Search a schedule for each price that members of the family have, too: with as many steps again, shared out
    between the prices. It is what can be known of a host before it begins."""

    found: str | None = None
    """Folder in which an earlier comparison has left the schedules that it found: they are played, and nothing is
    searched, whatever the other settings say."""

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


class BestSchedules(NamedTuple):
    """What is played of all that was searched."""

    fixed: Schedule | None
    """For all hosts."""
    per_price: dict[float, Schedule]
    """For those of each price; empty where it was not searched."""

    def by_file(self) -> dict[str, Schedule]:
        """By the names of their files."""
        named = {f"{PRICED}{price:g}": schedule for price, schedule in self.per_price.items()}
        return named if self.fixed is None else {BEST_FILE: self.fixed} | named


def read_best_schedules(folder: str | Path) -> BestSchedules:
    """From the files that a comparison has left. Raises ValueError, naming the file, if one cannot be read."""
    folder = Path(folder)
    files = sorted(folder.glob(f"{PRICED}*.json"))
    prices = {}
    for file in files:
        try:
            prices[float(file.stem.removeprefix(PRICED))] = read_schedule(file)
        except ValueError as error:
            raise ValueError(f"search.found: {error}") from error
    return BestSchedules(read_schedule(folder / f"{BEST_FILE}.json"), prices)


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


def search(
    pool: HostPool,
    config: SearchConfig = SearchConfig(),
    known: Sequence[Schedule] = (),
    among: Sequence[Member] | None = None,
) -> Found:
    """Searches with the hosts of training and their validation images; the pool is used up.

    Raises ValueError if the budget does not allow to see a schedule on one host of each member.

    Args:
        pool: The hosts.
        config: How it searches.
        known: Schedules that take part in the last race, whoever made them, if the budget allows one.
        among: Members of the pool's family that it is searched for. None: all.
    """
    members = pool.bench.family.members if among is None else among
    refuse_below(least_steps(len(members), pool, pool.n_envs), config, pool.n_envs)
    episode = pool.n_envs * pool.config.horizon
    generator = Generator(pool, config.seed, config.max_seeds)
    racer = Racer(pool, config.seed, config.steps // episode, config.one_in, among)
    first_one, *others = (generator.schedule(plan) for plan in find_winners(racer, generator, config))
    # In this order they are given up where the budget does not allow all of them a look.
    last = list(dict.fromkeys([first_one, *known, *others]))
    if len(last) > 1 and racer.affordable(racer.left) > 1:
        last = [last[i] for i in racer.race(last)]
    fresh = fresh_hosts(pool, config.seed, among)
    ours, *second = (play(pool, str(i), FixedSchedule(schedule), fresh) for i, schedule in enumerate(last[:2]))
    return Found(
        schedule=last[0],
        steps=racer.steps,
        candidates=len(racer.met),
        estimate=mean_interval(ours.objective),
        lead=paired_difference(ours, second[0]) if second else None,
        confirmation_steps=(1 + len(second)) * episode,
    )


def find_winners(racer: Racer, generator: Generator, config: SearchConfig) -> list[Plan]:
    """Races plans, then the best ones and their children, again and again; the winners of all races, last race first.
    What a race of them all takes is left over, where the budget has room for that."""
    episodes, n_envs = racer.left, racer.pool.n_envs
    finals = min(FINALS * racer.members, max(FINALS, episodes // 4))
    finals = finals if racer.affordable(episodes - finals) else 0
    tried: set[Plan] = set()

    def race(plans: list[Plan]) -> list[Plan]:
        tried.update(plans)
        schedules = [generator.schedule(plan) for plan in plans]
        return [plans[i] for i in racer.race(schedules, config.decisive, finals)]

    first = max(1, racer.affordable(max(1, round(config.explore * episodes))))
    best = race(generator.distinct(first, tried))
    size = max(2, n_envs // 2)
    winners: list[Plan] = []
    while (room := min(size, racer.affordable(racer.left - finals))) > 1:
        parents = best[: min(config.elites, room // 2)]
        winners = [*parents[:WINNERS], *winners]
        children = generator.distinct(room - len(parents), tried, parents)
        best = race([*parents, *children])
    return list(dict.fromkeys([*best[:WINNERS], *winners]))[: max(2, n_envs // config.decisive)]


def fresh_hosts(pool: HostPool, seed: int, among: Sequence[Member] | None) -> list[int]:
    """Seeds of as many hosts of these members as the pool has environments, which no search meets, and no comparison:
    of episode 0 are those that Tamiyo is judged on."""
    drawn = chain.from_iterable(episode_seeds(seed, EVALUATION, episode, pool.n_envs) for episode in count(1))
    theirs = (host for host in drawn if among is None or pool.bench.family.draw(host) in among)
    return list(islice(theirs, pool.n_envs))


def price_of(member: Member, pool: HostPool) -> float:
    """What its hosts pay for parameters."""
    return pool.config.objective.price if member.price is None else member.price


def prices_of(pool: HostPool) -> list[float]:
    """Of members of its family. Raises ValueError if they do not differ, or there is one for every host."""
    if pool.config.objective.price_to is not None:
        raise ValueError(
            f"search.per_price: every host has a price of its own; leave out objective.price_to and name some in "
            f"data.env.family, as {PRICE}"
        )
    prices = sorted({price_of(member, pool) for member in pool.bench.family.members})
    if len(prices) < 2:
        raise ValueError(f"search.per_price: all hosts have one price; name several in data.env.family, as {PRICE}")
    return prices


def least_steps(members: int, pool: HostPool, n_envs: int) -> int:
    """Environment steps that it takes to see one schedule on a host of each of so many members."""
    return -(-members // n_envs) * n_envs * pool.config.horizon


def check_budget(config: SearchConfig, pool: HostPool, n_envs: int) -> None:
    """Raises ValueError if a search, or one for each price, in `n_envs` environments cannot see a schedule on one host
    of each member."""
    members = pool.bench.family.members
    shares = {"steps": len(members)}
    if config.per_price:
        shares["per_price"] = max(Counter(price_of(member, pool) for member in members).values())
    for setting, most in shares.items():
        searches = len(prices_of(pool)) if setting == "per_price" else 1
        refuse_below(searches * least_steps(most, pool, n_envs), config, n_envs, searches)


def refuse_below(least: int, config: SearchConfig, n_envs: int, searches: int = 1) -> None:
    """Raises ValueError if the budget of so many searches is smaller than the least one."""
    if config.steps < least:
        raise ValueError(
            f"search.steps is {config.steps}; to see one schedule on a host of each member, {n_envs} hosts side by "
            f"side, takes {least}" + (f", for {searches} prices apart" if searches > 1 else "")
        )


def search_per_price(pool: HostPool, config: SearchConfig, known: Sequence[Schedule] = ()) -> dict[float, Schedule]:
    """The best fixed schedule for each price, `config.steps` shared out between them.

    Raises ValueError if prices do not differ between members of the pool's family.
    """
    prices, members = prices_of(pool), pool.bench.family.members
    share = replace(config, steps=config.steps // len(prices))
    found = {}
    for price in prices:
        theirs = [member for member in members if price_of(member, pool) == price]
        found[price] = search(pool, share, known, theirs).schedule
    return found
