"""Search for the best fixed schedule, on real hosts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from esper_lightning.controllers.schedules import FixedSchedule, Schedule
from esper_lightning.envs import HostPool
from esper_lightning.envs.context.distribution import FamilyConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.seeding import EVALUATION, episode_rng_seeds
from esper_lightning.evaluation.plans import Plan, PlannedSeed, PlanSampler
from esper_lightning.evaluation.play import play_episode
from esper_lightning.evaluation.search import (
    SearchConfig,
    SearchResult,
    SuccessiveHalving,
    check_budget,
    contexts_by_price,
    search,
    search_best_schedules,
)
from esper_lightning.evaluation.search import successive_halving as race_module
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.parallel import Processes
from esper_lightning.rewards import ObjectiveConfig
from tests.tiers import rest_is_slow

MakePool = Callable[..., HostPool]

SLOTS = ("block1.pool", "block2.pool", "block3")

EPISODE = 8 * 6
"""Environment steps of one episode of the `pool` fixture."""


@pytest.fixture(scope="module")
def pool(make_pool: MakePool) -> HostPool:
    """Pool with expensive growth: a fossilized conv_light costs more than any accuracy it can add."""
    return make_pool(8, objective=ObjectiveConfig(price=0.5), training=HostTraining(batches=1), executor="fused")


@pytest.fixture(scope="module")
def dear_and_free(pool: HostPool) -> list[Schedule]:
    dear = PlanSampler(pool, 0).to_schedule(
        Plan((PlannedSeed("block3", "conv_light", "linear_add", "FAST", 0),), fossilize_late=False)
    )
    return [dear, Schedule(SLOTS, ())]


@pytest.mark.parametrize("episodes", rest_is_slow([1, 2, 5], {1, 2}))
def test_of_two_schedules_whose_difference_is_known_the_better_one_wins(
    pool: HostPool, dear_and_free: list[Schedule], episodes: int
) -> None:
    # Rent: 0.5 · ln(1 + 2320 / 390) = 0.97 of accuracy, more than hosts can gain in their first six short epochs.
    for seed in range(3):
        racer = SuccessiveHalving(pool, seed, episodes=episodes, reduction=2)
        assert racer.rank(dear_and_free) == [1, 0]
        if racer.episodes_left:
            assert racer.rank(dear_and_free[::-1]) == [0, 1]


def test_all_candidates_of_a_stage_meet_the_same_hosts_and_the_better_part_meets_more(
    pool: HostPool, dear_and_free: list[Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[list[int]] = []
    real = pool.reset

    def watched(seeds: Any) -> Any:
        met.append(list(seeds))
        return real(seeds)

    monkeypatch.setattr(pool, "reset", watched)
    dear, free = dear_and_free
    ranking = SuccessiveHalving(pool, 0, episodes=3, reduction=2).rank([dear, dear, dear, free])

    first, second, *rest = met
    assert first == first[:2] * 4, "two hosts for each of four"
    assert second == second[:4] * 2, "four for each of two"
    assert not rest, "and one alone needs no race"
    assert not set(first) & set(second)
    assert not any(seed % 2 for seed in first + second), "hosts of training, none that is evaluated on"
    assert ranking[0] == 3 and sorted(ranking) == [0, 1, 2, 3]


def test_more_candidates_than_environments_are_looked_at_one_batch_after_the_other(
    pool: HostPool, dear_and_free: list[Schedule]
) -> None:
    dear, free = dear_and_free
    racer = SuccessiveHalving(pool, 0, episodes=3, reduction=8)

    ranking = racer.rank([*[dear] * 15, free])

    assert ranking[0] == 15
    assert (racer.episodes_spent, racer.episodes_left, racer.steps) == (3, 0, 3 * EPISODE)


def test_what_there_is_no_budget_for_is_left_out(pool: HostPool, dear_and_free: list[Schedule]) -> None:
    dear, free = dear_and_free
    racer = SuccessiveHalving(pool, 0, episodes=1, reduction=2)

    assert set(racer.rank([*[dear] * 8, free])) == set(range(8))
    assert racer.episodes_left == 0


@pytest.mark.parametrize(
    "steps",
    rest_is_slow(
        [EPISODE, 2 * EPISODE + 5, 3 * EPISODE, 7 * EPISODE, 12 * EPISODE - 1], {2 * EPISODE + 5, 7 * EPISODE}
    ),
)
def test_no_more_is_spent_than_the_budget_and_all_of_it_is_counted(
    pool: HostPool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = 0
    real = pool.step

    def watched(action: Any) -> Any:
        nonlocal spent
        spent += pool.n_envs
        return real(action)

    monkeypatch.setattr(pool, "step", watched)
    found = search(pool, SearchConfig(steps=steps, decisive=4, elites=2))

    assert found.steps + found.confirmation_steps == spent
    assert 0 < found.steps <= steps
    assert found.steps > steps - 3 * EPISODE


@pytest.fixture(scope="module")
def found(pool: HostPool) -> SearchResult:
    return search(pool, SearchConfig(steps=8 * EPISODE, decisive=4))


@pytest.mark.slow
def test_a_search_depends_on_its_seed_alone(pool: HostPool, found: SearchResult) -> None:
    again = search(pool, SearchConfig(steps=8 * EPISODE, decisive=4))

    assert again == found
    assert search(pool, SearchConfig(steps=8 * EPISODE, decisive=4, seed=1)).estimate != found.estimate


def test_what_is_found_is_a_schedule_for_these_hosts_with_what_it_is_worth(pool: HostPool, found: SearchResult) -> None:
    fresh = episode_rng_seeds(0, EVALUATION, 1, n_envs=8)

    assert found.schedule.slots == SLOTS
    assert found.candidates > 8
    assert found.estimate == mean_interval(
        play_episode(pool, "found", FixedSchedule(found.schedule), rng_seeds=fresh).objective
    )
    assert found.lead is not None and found.lead.low <= found.lead.high
    assert found.confirmation_steps == 2 * EPISODE


def test_a_search_finds_cheap_schedules_where_growth_is_expensive(pool: HostPool, found: SearchResult) -> None:
    random = PlanSampler(pool, rng_seed=5)
    racer = SuccessiveHalving(pool, 5, episodes=4, reduction=2)
    worth = racer._play_stage([random.to_schedule(random.draw()) for _ in range(8)], max_episodes=1)

    assert found.estimate.mean > np.mean(worth) + 0.1


def test_a_budget_below_one_episode_is_refused(pool: HostPool) -> None:
    least = f"a host of each context, 8 hosts side by side, takes {EPISODE}$"
    with pytest.raises(ValueError, match=rf"search\.steps is 47; to see one schedule on {least}"):
        search(pool, SearchConfig(steps=47))


def fossilized_blueprints(schedule: Schedule) -> set[str]:
    """Return the blueprints of the seeds that the schedule fossilizes."""
    there: dict[str, str] = {}
    kept = set()
    for entry in schedule.entries:
        if entry.op == "GERMINATE":
            there[entry.slot] = entry.blueprint
        elif entry.op == "FOSSILIZE":
            kept.add(there[entry.slot])
    return kept


@pytest.fixture(scope="module")
def varied(make_pool: MakePool) -> HostPool:
    family = FamilyConfig(train=[{"objective.price": [0.0, 0.1, 5.0]}])
    return make_pool(8, family=family, training=HostTraining(batches=1), executor="fused")


def test_every_candidate_meets_equally_many_hosts_of_each_context(
    varied: HostPool, dear_and_free: list[Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[tuple[str, int]] = []
    real = race_module.play_cells
    monkeypatch.setattr(race_module, "play_cells", lambda pool, cells: met.extend(cells) or real(pool, cells))
    dear, free = dear_and_free
    racer = SuccessiveHalving(varied, 0, episodes=9, reduction=4)

    ranking = racer.rank([*[dear] * 3, free])  # half of 9 episodes of 8: 8 hosts for each of 4, so 2 of each context

    family, seeds = varied.env_factory.context_distribution, [seed for _, seed in met]
    assert ranking[0] == 3
    assert [schedule for schedule, _ in met] == [dear] * 18 + [free] * 6
    assert seeds[:6] * 4 == seeds and not any(seed % 2 for seed in seeds)
    assert Counter(str(family.draw(seed)) for seed in seeds[:6]) == {str(member): 2 for member in family.contexts}
    assert racer.episodes_spent == 3


@pytest.mark.slow
def test_the_best_schedule_of_a_family_differs_from_that_of_one_context(varied: HostPool) -> None:
    found = search(varied, SearchConfig(steps=30 * EPISODE, decisive=4))

    assert found.steps <= 30 * EPISODE
    # Growing pays at price 0, and loses at five times the logarithm of growth.
    assert not fossilized_blueprints(found.schedule) & {"conv_light", "conv_heavy"}


@pytest.mark.slow
def test_for_each_price_another_schedule_is_found_with_its_share_of_the_steps(
    varied: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[int] = []
    real = race_module.play_cells
    monkeypatch.setattr(
        race_module, "play_cells", lambda pool, cells: met.extend(seed for _, seed in cells) or real(pool, cells)
    )
    found = search_best_schedules(varied, SearchConfig(steps=36 * EPISODE, decisive=4), fixed=False).per_price

    family = varied.env_factory.context_distribution
    assert list(found) == [0.0, 0.1, 5.0]
    large = {"conv_light", "conv_heavy"}
    assert fossilized_blueprints(found[0.0]) & large and not fossilized_blueprints(found[5.0]) & large, "free, and dear"
    times = Counter(family.draw(seed).price for seed in met)
    assert all(times[price] == pytest.approx(12 * 8, abs=16) for price in found)


@pytest.mark.slow
def test_processes_find_the_schedules_that_one_process_finds(varied: HostPool) -> None:
    config = SearchConfig(steps=12 * EPISODE, decisive=2)

    found = search_best_schedules(varied, config)
    assert found.fixed is not None and len(found.per_price) == 3
    assert search_best_schedules(varied, config, executor=Processes(2)) == found


def test_where_all_hosts_have_one_price_there_is_nothing_to_search_by(pool: HostPool) -> None:
    with pytest.raises(ValueError, match=r"search\.per_price: all hosts have one price; name several in"):
        search_best_schedules(pool, SearchConfig(steps=36 * EPISODE))


def test_a_context_without_a_price_has_that_of_the_settings(make_pool: MakePool) -> None:
    family = FamilyConfig(train=[{"training.lr": [0.01]}, {"training.lr": [0.02], "objective.price": [1.0]}])
    mixed = make_pool(2, family=family, objective=ObjectiveConfig(price=0.25))

    assert list(contexts_by_price(mixed)) == [0.25, 1.0]
    found = search_best_schedules(mixed, SearchConfig(steps=2 * 2 * 6), fixed=False)
    assert found.fixed is None and list(found.per_price) == [0.25, 1.0]


def test_prices_of_every_host_alone_cannot_be_searched_by(make_pool: MakePool) -> None:
    drawn = make_pool(2, objective=ObjectiveConfig(price=0.1, price_to=0.3))

    with pytest.raises(ValueError, match=r"every host has a price of its own; leave out objective\.price_to"):
        contexts_by_price(drawn)


@pytest.mark.parametrize(("per_price", "least"), [(False, 2 * 12), (True, 3 * 12)])
def test_a_budget_is_refused_before_anything_is_played_with_the_least_that_will_do(
    varied: HostPool, per_price: bool, least: int
) -> None:
    """Three contexts in two environments take two episodes of six ticks; one context for each of three prices takes
    three."""
    check_budget(SearchConfig(steps=least, per_price=per_price), varied, n_envs=2)

    with pytest.raises(ValueError, match=rf"search\.steps is {least - 1}; .* takes {least}"):
        check_budget(SearchConfig(steps=least - 1, per_price=per_price), varied, n_envs=2)


def test_episodes_too_short_for_a_seed_are_refused_before_anything_is_played(make_pool: MakePool) -> None:
    family = FamilyConfig(train=[{"objective.price": [0.0]}, {"objective.price": [1.0], "horizon": [1]}])
    short = make_pool(2, family=family)

    check_budget(SearchConfig(steps=999, per_price=False), short, n_envs=2)
    with pytest.raises(ValueError, match=r"no seed can be fossilized in episodes of 1 ticks; raise env\.horizon, or"):
        check_budget(SearchConfig(steps=999, per_price=True), short, n_envs=2)


@pytest.mark.parametrize(
    ("episodes", "hosts"),
    rest_is_slow(product([1, 2, 3, 4, 5, 8, 13, 30], ["pool", "varied"]), {(1, "pool"), (4, "varied"), (13, "pool")}),
)
def test_a_schedule_that_is_known_already_wins_by_being_better_and_not_else(
    request: pytest.FixtureRequest, hosts: str, episodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: HostPool = request.getfixturevalue(hosts)
    known = Schedule(SLOTS, ())
    config = SearchConfig(steps=episodes * EPISODE, decisive=4)
    for worth in (9.0, -9.0):

        def judged(_: HostPool, cells: Sequence[tuple[Schedule, int]], worth: float = worth) -> list[float]:
            return [worth if schedule == known else len(schedule.entries) / 100.0 for schedule, _ in cells]

        monkeypatch.setattr(race_module, "play_cells", judged)
        found = search(pool, config, [known, known])

        assert found.steps <= config.steps
        assert (found.schedule == known) == (worth > 0.0 and episodes >= 3), "before that there is no last race"


def test_a_budget_too_small_for_all_contexts_is_refused(make_pool: MakePool) -> None:
    pool = make_pool(2, family=FamilyConfig(train=[{"objective.price": [0.0, 0.1, 5.0]}]))
    least = "a host of each context, 2 hosts side by side, takes 24$"
    with pytest.raises(ValueError, match=rf"search\.steps is 12; to see one schedule on {least}"):
        search(pool, SearchConfig(steps=12))


@pytest.mark.parametrize(
    "bad",
    [{"steps": 0}, {"seed": -1}, {"max_seeds": 0}, {"explore": 0.0}, {"one_in": 1}, {"decisive": 0}, {"elites": 0}],
)
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"search\.{next(iter(bad))} must"):
        replace(SearchConfig(), **bad)


@pytest.mark.parametrize("setting", [{"steps": 0}, {"steps": 10**18}, {"seed": 10**20}])
def test_a_budget_that_no_search_can_have_is_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"search.{next(iter(setting))} must"):
        SearchConfig(**setting)
