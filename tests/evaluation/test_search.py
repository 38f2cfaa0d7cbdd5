"""Schedules that the search for the best fixed one draws, and the search on real hosts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from esper_lightning.controllers.schedules import FixedSchedule, Schedule, ScheduledAction
from esper_lightning.envs import HostPool
from esper_lightning.envs.family import FamilyConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.rewards import ObjectiveConfig
from esper_lightning.envs.vector_env import episode_rng_seeds
from esper_lightning.evaluation import search as search_module
from esper_lightning.evaluation.play import play_episode
from esper_lightning.evaluation.search import Racing, ScheduleSampler, SearchConfig, check_budget, search
from esper_lightning.growth.stages import Stage
from tests.conftest import FREE, SMALL
from tests.tiers import rest_is_slow

MakePool = Callable[..., HostPool]

SLOTS = ("block1.pool", "block2.pool", "block3")

EPISODE = 8 * 6
"""Environment steps of one episode of the `pool` fixture."""


@pytest.fixture(
    scope="module",
    params=[pytest.param({"horizon": 12}, marks=pytest.mark.slow), FREE],
    ids=["as by default", "all heads"],
)
def roomy(make_pool: MakePool, request: pytest.FixtureRequest) -> HostPool:
    """Pool with time for several seeds."""
    return make_pool(8, **request.param)


@pytest.fixture(scope="module")
def sampler(roomy: HostPool) -> ScheduleSampler:
    return ScheduleSampler(roomy, rng_seed=0, horizon=roomy.horizon)


@pytest.fixture(scope="module")
def drawn(sampler: ScheduleSampler) -> list[Schedule]:
    return [sampler.draw() for _ in range(600)]


def check(schedule: Schedule, pool: HostPool) -> None:
    assert list(schedule.entries) == sorted(schedule.entries, key=lambda entry: (entry.tick, entry.op == "GERMINATE"))
    seeds = {entry.slot for entry in schedule.entries}
    assert len(schedule.entries) == 2 * len(seeds) > 0, "each seed has a germination and an end"
    for slot in seeds:
        start, end = (entry for entry in schedule.entries if entry.slot == slot)
        assert start.op == "GERMINATE" and end.op in ("CULL", "FOSSILIZE")
        assert start.tempo is not None
        assert 0 <= start.tick <= pool.config.horizon - 3 - pool.config.actions.tempos[start.tempo], "time to keep it"
        assert start.tick < end.tick < pool.config.horizon


def test_schedules_are_drawn_from_all_that_there_is_and_early_ticks_are_likelier(
    roomy: HostPool, drawn: list[Schedule]
) -> None:
    for schedule in drawn:
        check(schedule, roomy)
    entries = [entry for schedule in drawn for entry in schedule.entries]
    starts = [entry for entry in entries if entry.op == "GERMINATE"]
    for head in ("slot", "blueprint", "tempo"):
        assert {getattr(start, head) for start in starts} == set(getattr(roomy.space, head))
    ticks = Counter(start.tick for start in starts if start.tempo == "FAST")
    assert set(ticks) == set(range(9)) and ticks[0] > 2 * ticks[8]
    culled = sum(entry.op == "CULL" for entry in entries)
    assert culled == pytest.approx(len(starts) / 3, abs=5 * (len(starts) * 2 / 9) ** 0.5)


def test_a_crossover_takes_each_slot_from_one_of_its_parents_and_changes_at_most_one(
    roomy: HostPool, sampler: ScheduleSampler, drawn: list[Schedule]
) -> None:
    news = Counter[int]()
    for one, other in pairwise(drawn):
        child = sampler.crossover(one, other)
        check(child, roomy)
        news[len({entry.slot for entry in set(child.entries) - set(one.entries) - set(other.entries)})] += 1
    # A child that would be empty is drawn anew.
    assert news[0] and news[1] and sum(news[n] for n in news if n > 1) < 0.05 * len(drawn)


def test_all_but_the_culled_seeds_of_a_schedule_are_there_in_the_end(roomy: HostPool, drawn: list[Schedule]) -> None:
    """Every scheduled action is possible with any heads, unless too many are due at once; the pool raises at a mask."""
    few = [one for one in drawn if len(one.entries) <= 4 and max(entry.tick for entry in one.entries) <= 7]
    schedules = sorted(few, key=lambda one: -sum(entry.op == "CULL" for entry in one.entries))[: roomy.n_envs]
    play_episode(roomy, "schedules", FixedSchedule(schedules), rng_seeds=range(roomy.n_envs))

    for env, schedule in zip(roomy.envs, schedules, strict=True):
        kept = {entry.slot for entry in schedule.entries if entry.op == "FOSSILIZE"}
        assert {slot.name for slot in env.slots if slot.stage is Stage.FOSSILIZED} == kept
        assert [slot.name for slot in env.slots if slot.live] == []


@pytest.fixture(scope="module")
def pool(make_pool: MakePool) -> HostPool:
    """Pool with expensive growth: a fossilized conv_light costs more than any score it can add."""
    return make_pool(8, objective=ObjectiveConfig(price=0.5), training=HostTraining(batches=1), executor="fused")


@pytest.fixture(scope="module")
def varied(make_pool: MakePool) -> HostPool:
    family = FamilyConfig(train=[{"objective.price": [0.0, 0.1, 5.0]}])
    return make_pool(8, family=family, training=HostTraining(batches=1), executor="fused")


@pytest.fixture(scope="module")
def dear_and_free() -> list[Schedule]:
    # Rent: 0.5 · ln(1 + 2320 / 390) = 0.97 of score, more than hosts can gain in their first six short epochs.
    start = ScheduledAction(0, "GERMINATE", "block3", "conv_light", "FAST")
    return [Schedule(SLOTS, (start, ScheduledAction(1, "FOSSILIZE", "block3"))), Schedule(SLOTS, ())]


@pytest.fixture(autouse=True)
def small_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "DECISIVE", 4)


def racing(pool: HostPool, episodes: int) -> Racing:
    return Racing(pool, 0, pool.env_factory.context_distribution.contexts, episodes=episodes)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """RNG seeds of the hosts of every episode of a race."""
    seen: list[list[int]] = []
    real = search_module.final_objectives

    def watched(pool: HostPool, controller: Any, rng_seeds: Sequence[int]) -> list[float]:
        seen.append(list(rng_seeds))
        return real(pool, controller, rng_seeds)

    monkeypatch.setattr(search_module, "final_objectives", watched)
    return seen


def test_all_candidates_of_a_stage_meet_the_same_hosts_and_the_better_part_meets_more(
    pool: HostPool, dear_and_free: list[Schedule], met: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "ONE_IN", 2)
    dear, free = dear_and_free
    others = [dear._replace(entries=(dear.entries[0], dear.entries[1]._replace(tick=tick))) for tick in (1, 2, 3)]
    ranked = racing(pool, 3).rank([*others, free], reserve=0)

    first, second = met  # four hosts decide
    assert first == first[:2] * 4, "two hosts for each of four"
    assert second == second[:4] * 2, "four for each of two"
    assert not set(first) & set(second)
    assert not any(seed % 2 for seed in first + second), "hosts of training, none that is evaluated on"
    assert ranked[0] == free and sorted(ranked) == sorted([*others, free])


@pytest.mark.parametrize("steps", rest_is_slow([EPISODE, 3 * EPISODE + 5, 12 * EPISODE - 1], {3 * EPISODE + 5}))
def test_a_search_depends_on_its_seed_alone_and_spends_its_budget(
    pool: HostPool, steps: int, met: list[list[int]]
) -> None:
    found = search(pool, SearchConfig(steps=steps))
    assert steps - 2 * EPISODE < len(met) * EPISODE <= steps
    first, met[:] = list(met), []

    assert search(pool, SearchConfig(steps=steps)) == found and met == first
    assert found.slots == SLOTS


@pytest.mark.slow
def test_a_search_finds_cheap_schedules_where_growth_is_expensive(pool: HostPool) -> None:
    random, fresh = ScheduleSampler(pool, 5, horizon=pool.horizon), episode_rng_seeds(0, 1, 1, n_envs=8)
    found = play_episode(pool, "found", FixedSchedule(search(pool, SearchConfig(steps=8 * EPISODE))), rng_seeds=fresh)
    worth = racing(pool, 4).play([random.draw() for _ in range(8)], 1)
    assert found.objective.mean() > np.mean(worth) + 0.1


def test_every_candidate_meets_equally_many_hosts_of_each_context(
    varied: HostPool, dear_and_free: list[Schedule], met: list[list[int]]
) -> None:
    racing(varied, 6).rank(dear_and_free, reserve=0)

    for row in met:
        prices = Counter(varied.env_factory.context_distribution.draw(seed).price for seed in row[:6])
        assert len(prices) == 3 and len(set(prices.values())) == 1


@pytest.mark.parametrize(("episodes", "hosts"), [(2, "pool"), (3, "varied"), (13, "pool")])
def test_a_schedule_that_is_known_already_wins_by_being_better_and_not_else(
    request: pytest.FixtureRequest, hosts: str, episodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: HostPool = request.getfixturevalue(hosts)
    known = Schedule(SLOTS, ())
    for worth in (9.0, -9.0):

        def judged(_: HostPool, playing: FixedSchedule, seeds: Sequence[int], worth: float = worth) -> list[float]:
            return [worth if one == known else len(one.entries) / 100.0 for one in playing.schedules]

        monkeypatch.setattr(search_module, "final_objectives", judged)
        found = search(pool, SearchConfig(steps=episodes * EPISODE), [known, known])

        assert (found == known) == (worth > 0.0 and episodes >= 3), "before that there is no last race"


def test_a_budget_is_refused_before_anything_is_played_with_the_least_that_will_do(
    varied: HostPool, make_pool: MakePool
) -> None:
    """Three contexts in two environments take two episodes of six ticks."""
    check_budget(SearchConfig(steps=24), varied, n_envs=2)

    with pytest.raises(ValueError, match=r"search\.steps is 23; .* takes 24"):
        check_budget(SearchConfig(steps=23), varied, n_envs=2)
    short = make_pool(1, horizon=3, lifecycle=replace(SMALL.lifecycle, training_ticks=2))
    with pytest.raises(ValueError, match=r"no seed can be fossilized in episodes of 3 ticks; raise env\.horizon"):
        check_budget(SearchConfig(), short, n_envs=2)
