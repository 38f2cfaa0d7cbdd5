"""Plans of the search for the best fixed schedule, and the search on real hosts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from esper_lightning.controllers.schedules import FixedSchedule, Schedule
from esper_lightning.envs import HostPool
from esper_lightning.envs.family import FamilyConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.seeding import episode_rng_seeds
from esper_lightning.evaluation import search as search_module
from esper_lightning.evaluation.play import play_episode
from esper_lightning.evaluation.search import (
    Plan,
    PlannedSeed,
    PlanSampler,
    SearchConfig,
    SuccessiveHalving,
    check_budget,
    contexts_by_price,
    search,
    search_best_schedules,
)
from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import ObjectiveConfig
from tests.conftest import FREE, SMALL
from tests.tiers import rest_is_slow

MakePool = Callable[..., HostPool]

SLOTS = ("block1.pool", "block2.pool", "block3")

EPISODE = 8 * 6
"""Environment steps of one episode of the `pool` fixture."""


@pytest.fixture(scope="module", params=[{"horizon": 12}, FREE], ids=["as by default", "all heads"])
def roomy(make_pool: MakePool, request: pytest.FixtureRequest) -> HostPool:
    """Pool with time for several seeds."""
    return make_pool(8, **request.param)


@pytest.fixture(scope="module")
def sampler(roomy: HostPool) -> PlanSampler:
    return PlanSampler(roomy, rng_seed=0)


@pytest.fixture(scope="module")
def drawn(sampler: PlanSampler) -> list[Plan]:
    return [sampler.draw() for _ in range(600)]


def check(plan: Plan, pool: HostPool) -> None:
    places = [(pool.space.slot.index(seed.slot), seed.tick) for seed in plan.seeds]
    assert places == sorted(set(places)) != [], "in the order of the host's slots, one after the other"
    for seed, following in pairwise(plan.seeds):
        if seed.slot == following.slot:
            closed = 1 + pool.config.lifecycle.embargo_ticks
            assert seed.cull_tick is not None and seed.cull_tick + closed <= following.tick, "it makes way"
    for seed in plan.seeds:
        assert 0 <= seed.tick <= pool.config.horizon - 3 - pool.config.actions.tempos[seed.tempo], "time to keep it"
        assert seed.cull_tick is None or seed.tick < seed.cull_tick < pool.config.horizon


def test_plans_are_drawn_from_all_that_there_is_and_early_ticks_are_likelier(
    roomy: HostPool, drawn: list[Plan]
) -> None:
    for plan in drawn:
        check(plan, roomy)
    seeds = [seed for plan in drawn for seed in plan.seeds]
    for head in ("slot", "blueprint", "tempo"):
        assert {getattr(seed, head) for seed in seeds} == set(getattr(roomy.space, head))
    ticks = Counter(seed.tick for seed in seeds if seed.tempo == "FAST")
    assert set(ticks) == set(range(9)) and ticks[0] > 2 * ticks[8]
    culled = [seed.cull_tick - seed.tick for seed in seeds if seed.cull_tick is not None]
    assert len(culled) == pytest.approx(len(seeds) / 3, abs=5 * (len(seeds) * 2 / 9) ** 0.5)
    assert {plan.fossilize_late for plan in drawn} == {True, False}


def test_a_mutation_changes_one_thing_and_a_child_takes_each_slot_from_one_of_its_parents(
    roomy: HostPool, sampler: PlanSampler, drawn: list[Plan]
) -> None:
    news = set()
    for one, other in pairwise(drawn):
        mutated, child = sampler.mutate(one), sampler.crossover(one, other)
        check(mutated, roomy)
        check(child, roomy)
        # A mutation may add or move one seed, and thereby cull the previous seed in that slot earlier.
        assert len({seed.slot for seed in set(one.seeds) ^ set(mutated.seeds)}) <= 2
        assert (one.fossilize_late != mutated.fossilize_late) <= (one.seeds == mutated.seeds)
        news.add(len(set(child.seeds) - set(one.seeds) - set(other.seeds)))
    assert {0, 1} <= news <= {0, 1, 2}, "two where one makes way for another"


def test_all_but_the_culled_seeds_of_a_plan_are_there_in_the_end(
    roomy: HostPool, sampler: PlanSampler, drawn: list[Plan]
) -> None:
    """Every scheduled action is possible with any heads, unless too many are due at once; the pool raises at a mask."""
    one, other = (PlannedSeed(SLOTS[0], name, "FAST", 0, 2) for name in ("norm", "conv_small"))
    relay = sampler._make_plan([one, other._replace(tick=2, cull_tick=None)], late=False)
    assert [(seed.tick, seed.cull_tick) for seed in relay.seeds] == [(0, 2), (4, None)], "two ticks till it is open"
    few = [plan for plan in drawn if len(plan.seeds) <= 2 and max(seed.tick for seed in plan.seeds) <= 3]
    plans = [relay, *(plan for plan in few if any(seed.cull_tick for seed in plan.seeds)), *few][: roomy.n_envs]
    play_episode(
        roomy, "plans", FixedSchedule([sampler.to_schedule(plan) for plan in plans]), rng_seeds=range(roomy.n_envs)
    )

    for env, plan in zip(roomy.envs, plans, strict=True):
        kept = [(slot.name, slot.blueprint) for slot in env.slots if slot.stage is Stage.FOSSILIZED]
        assert kept == [(seed.slot, seed.blueprint) for seed in plan.seeds if seed.cull_tick is None]
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
def dear_and_free(pool: HostPool) -> list[Schedule]:
    # Rent: 0.5 · ln(1 + 2320 / 390) = 0.97 of score, more than hosts can gain in their first six short epochs.
    dear = Plan((PlannedSeed("block3", "conv_light", "FAST", 0),), fossilize_late=False)
    return [PlanSampler(pool, 0).to_schedule(dear), Schedule(SLOTS, ())]


@pytest.fixture(autouse=True)
def small_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "DECISIVE", 4)


def racer(pool: HostPool, episodes: int) -> SuccessiveHalving:
    return SuccessiveHalving(pool, 0, pool.env_factory.context_distribution.contexts, episodes)


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
    ranking = racer(pool, 3).rank([dear, dear, dear, free])

    first, second = met  # one alone needs no third race
    assert first == first[:2] * 4, "two hosts for each of four"
    assert second == second[:4] * 2, "four for each of two"
    assert not set(first) & set(second)
    assert not any(seed % 2 for seed in first + second), "hosts of training, none that is evaluated on"
    assert ranking[0] == 3 and sorted(ranking) == [0, 1, 2, 3]


@pytest.mark.parametrize("steps", rest_is_slow([EPISODE, 3 * EPISODE + 5, 12 * EPISODE - 1], {3 * EPISODE + 5}))
def test_a_search_depends_on_its_seed_alone_and_spends_its_budget(
    pool: HostPool, steps: int, met: list[list[int]]
) -> None:
    found = search(pool, SearchConfig(steps=steps))
    assert steps - 3 * EPISODE < len(met) * EPISODE <= steps
    first, met[:] = list(met), []

    assert search(pool, SearchConfig(steps=steps)) == found and met == first
    assert found.slots == SLOTS


@pytest.mark.slow
def test_a_search_finds_cheap_schedules_where_growth_is_expensive(pool: HostPool, varied: HostPool) -> None:
    random, fresh = PlanSampler(pool, rng_seed=5), episode_rng_seeds(0, 1, 1, n_envs=8)
    found = play_episode(pool, "found", FixedSchedule(search(pool, SearchConfig(steps=8 * EPISODE))), rng_seeds=fresh)
    worth = racer(pool, 4).play_stage([random.to_schedule(random.draw()) for _ in range(8)], max_episodes=1)
    assert found.objective.mean() > np.mean(worth) + 0.1

    best = search_best_schedules(varied, SearchConfig(steps=36 * EPISODE, per_price=True), fixed=False)
    assert list(best) == [f"best_schedule_price_{price}" for price in ("0", "0.1", "5")]
    free, _, dear = (play_episode(varied, "", FixedSchedule(one), rng_seeds=fresh) for one in best.values())
    assert dear.parameters.mean() < free.parameters.mean()


def test_every_candidate_meets_equally_many_hosts_of_each_context(
    varied: HostPool, dear_and_free: list[Schedule], met: list[list[int]]
) -> None:
    racer(varied, 6).rank(dear_and_free * 2)

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


def test_there_must_be_several_prices_to_search_for_each(pool: HostPool, varied: HostPool) -> None:
    assert list(contexts_by_price(varied)) == [0.0, 0.1, 5.0]
    with pytest.raises(ValueError, match=r"search\.per_price: all hosts have one price; name several in"):
        contexts_by_price(pool)


@pytest.mark.parametrize(("per_price", "least"), [(False, 2 * 12), (True, 3 * 12)])
def test_a_budget_is_refused_before_anything_is_played_with_the_least_that_will_do(
    varied: HostPool, per_price: bool, least: int
) -> None:
    """Three contexts in two environments take two episodes of six ticks; one context for each of three prices takes
    three."""
    check_budget(SearchConfig(steps=least, per_price=per_price), varied, n_envs=2)

    with pytest.raises(ValueError, match=rf"search\.steps is {least - 1}; .* takes {least}"):
        check_budget(SearchConfig(steps=least - 1, per_price=per_price), varied, n_envs=2)


def test_episodes_too_short_for_a_seed_are_refused(make_pool: MakePool) -> None:
    short = make_pool(1, horizon=3, lifecycle=replace(SMALL.lifecycle, training_ticks=2))

    with pytest.raises(ValueError, match=r"no seed can be fossilized in episodes of 3 ticks; raise env\.horizon"):
        check_budget(SearchConfig(), short, n_envs=2)
