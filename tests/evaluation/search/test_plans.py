"""Plans of the search for the best fixed schedule."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from esper_lightning.controllers.schedules import FixedSchedule
from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.evaluation.plans import Plan, PlannedSeed, PlanSampler
from esper_lightning.growth.stages import Stage
from tests.conftest import FREE, SMALL

MakePool = Callable[..., HostPool]

SLOT = "block1.pool"

HEADS: dict[str, dict[str, Any]] = {"as by default": {"horizon": 12}, "all": FREE}


@pytest.fixture(scope="module", params=HEADS)
def pool(make_pool: MakePool, request: pytest.FixtureRequest) -> HostPool:
    return make_pool(8, **HEADS[request.param])


@pytest.fixture(scope="module")
def generator(pool: HostPool) -> PlanSampler:
    return PlanSampler(pool, rng_seed=0)


@pytest.fixture(scope="module")
def drawn(generator: PlanSampler) -> list[Plan]:
    return [generator.draw() for _ in range(600)]


def check(plan: Plan, pool: HostPool) -> None:
    places = [(pool.space.slot.index(seed.slot), seed.tick) for seed in plan.seeds]
    assert places == sorted(set(places)), "in the order of the host's slots, one after the other"
    assert plan.seeds
    for seed, following in pairwise(plan.seeds):
        if seed.slot == following.slot:
            closed = 1 + pool.config.lifecycle.embargo_ticks
            assert seed.cull_tick is not None and seed.cull_tick + closed <= following.tick, "it makes way"
    for seed in plan.seeds:
        assert seed.blueprint in pool.space.blueprint
        assert seed.style in pool.space.style and seed.tempo in pool.space.tempo
        ticks = pool.config.actions.tempos[seed.tempo]
        assert 0 <= seed.tick <= pool.config.horizon - 1 - (1 + 1 + ticks), "there is time to keep it"
        assert seed.cull_tick is None or seed.tick < seed.cull_tick < pool.config.horizon


def test_plans_are_drawn_from_all_that_there_is(pool: HostPool, drawn: list[Plan]) -> None:
    for plan in drawn:
        check(plan, pool)
    seeds = [seed for plan in drawn for seed in plan.seeds]
    for number in (1, 2, 3):
        assert sum(len(plan.seeds) == number for plan in drawn) == pytest.approx(200, abs=5 * (600 * 2 / 9) ** 0.5)
    assert {seed.slot for seed in seeds} == set(pool.space.slot)
    assert {seed.blueprint for seed in seeds} == set(pool.space.blueprint)
    assert {seed.style for seed in seeds} == set(pool.space.style)
    assert {seed.tick for seed in seeds if seed.tempo == "FAST"} == set(range(9))
    assert {plan.fossilize_late for plan in drawn} == {True, False}
    culled = [seed.cull_tick - seed.tick for seed in seeds if seed.cull_tick is not None]
    assert len(culled) == pytest.approx(len(seeds) / 3, abs=5 * (len(seeds) * 2 / 9) ** 0.5)
    assert set(culled) == set(range(1, 12)), "at once, or in the last tick, or whenever"


def test_early_ticks_are_likelier(drawn: list[Plan]) -> None:
    ticks = Counter(seed.tick for plan in drawn for seed in plan.seeds if seed.tempo == "FAST")

    assert ticks[0] > 2 * ticks[8]


def without(plan: Plan, slot: str) -> tuple[PlannedSeed, ...]:
    return tuple(seed for seed in plan.seeds if seed.slot != slot)


def test_a_neighbour_differs_in_one_thing(pool: HostPool, generator: PlanSampler, drawn: list[Plan]) -> None:
    for plan in drawn:
        other = generator.mutate(plan)
        check(other, pool)
        changed = set(plan.seeds) ^ set(other.seeds)
        assert len({seed.slot for seed in changed}) <= 2
        # A mutation may add or move one seed, and thereby cull the previous seed in that slot earlier.
        assert len(set(other.seeds) - set(plan.seeds)) <= 2 and len(set(plan.seeds) - set(other.seeds)) <= 2
        assert (plan.fossilize_late != other.fossilize_late) <= (not changed)


def test_a_child_has_in_every_slot_what_one_of_its_parents_has_but_for_one_change(
    pool: HostPool, generator: PlanSampler, drawn: list[Plan]
) -> None:
    news = []
    for one, other in pairwise(drawn):
        child = generator.crossover(one, other)
        check(child, pool)
        news.append(len(set(child.seeds) - set(one.seeds) - set(other.seeds)))
    assert {0, 1} <= set(news) <= {0, 1, 2}, "two where one makes way for another"


def test_what_is_known_is_not_tried_again(generator: PlanSampler, drawn: list[Plan]) -> None:
    known = set(drawn)
    fresh = generator.sample_distinct(50, known)

    assert len(set(fresh)) == 50 and not known & set(fresh)
    assert not known & set(generator.sample_distinct(50, known, parents=drawn[:3]))


def test_a_space_that_is_exhausted_gives_fewer(make_pool: MakePool) -> None:
    tiny = make_pool(1, horizon=4, actions=ActionConfig(blueprints=["norm"], tempos={"FAST": 1}, max_seeds=1))
    generator = PlanSampler(tiny, rng_seed=0)

    # The seed germinates in tick 0 and is fossilized, or culled in tick 1, 2 or 3; each plan exists with both values of
    # `fossilize_late`.
    assert len(generator.sample_distinct(100, set())) == 3 * 4 * 2, "three slots, four ends, fossilized early or late"
    assert generator.sample_distinct(5, set(generator.sample_distinct(100, set()))) == []


@pytest.mark.parametrize(("limits", "most"), [({"max_seeds": 2}, 2), ({"max_seeds": 5}, 5), ({}, 6)])
def test_no_plan_has_more_seeds_than_allowed(pool: HostPool, limits: dict[str, int], most: int) -> None:
    generator = PlanSampler(pool, 0, **limits)

    assert max(len(generator.draw().seeds) for _ in range(100)) == min(most, 3)
    plan = generator.draw()
    numbers = {len((plan := generator.mutate(plan)).seeds) for _ in range(1000)}
    assert max(numbers) == most and min(numbers) == 1


def test_all_but_the_culled_seeds_of_a_plan_are_there_in_the_end(
    pool: HostPool, generator: PlanSampler, drawn: list[Plan]
) -> None:
    """Every scheduled action is possible with any heads, unless too many are due at once; the pool raises at a mask."""
    roomy = [plan for plan in drawn if len(plan.seeds) <= 2 and max(seed.tick for seed in plan.seeds) <= 3]
    one, other = (PlannedSeed(SLOT, name, pool.space.style[0], "FAST", 0, 2) for name in generator.growable[SLOT][:2])
    relay = generator._make_plan([one, other._replace(tick=2, cull_tick=None)], late=False)
    assert [(seed.tick, seed.cull_tick) for seed in relay.seeds] == [(0, 2), (4, None)], (
        "two ticks till it is open again"
    )
    roomy = [relay, *(plan for plan in roomy if any(seed.cull_tick for seed in plan.seeds)), *roomy]
    plans = roomy[: pool.n_envs]
    controller = FixedSchedule([generator.to_schedule(plan) for plan in plans])
    pool.reset(range(pool.n_envs))
    controller.reset(pool)
    for _ in range(pool.config.horizon):
        pool.step(controller.act(pool))

    for env, plan in zip(pool.envs, plans, strict=True):
        kept = [(slot.name, slot.blueprint) for slot in env.slots if slot.stage is Stage.FOSSILIZED]
        assert kept == [(seed.slot, seed.blueprint) for seed in plan.seeds if seed.cull_tick is None]
        assert [slot.name for slot in env.slots if slot.live] == []


def test_an_episode_too_short_for_any_seed_is_refused(make_pool: MakePool) -> None:
    short = make_pool(1, horizon=3, lifecycle=replace(SMALL.lifecycle, training_ticks=2))

    with pytest.raises(ValueError, match=r"no seed can be fossilized in episodes of 3 ticks; raise env\.horizon"):
        PlanSampler(short, rng_seed=0)
