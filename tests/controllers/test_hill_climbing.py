"""Hill climbing with rent, in a real pool whose measurements are overwritten where a test needs other values."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from esper_lightning.blueprints import get_blueprint
from esper_lightning.controllers.hill_climbing import (
    ClimbingConfig,
    HillClimbing,
    list_candidates,
    min_ticks_to_judge,
    net_gain,
)
from esper_lightning.envs import ActionConfig, HostPool, Op
from esper_lightning.growth.gradient_stats import GradientStats
from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import ObjectiveConfig
from tests.conftest import FREE, SMALL
from tests.decisions import WAIT, Row, act, cull, fossilize, germinate
from tests.tiers import rest_is_slow

MakePool = Callable[..., HostPool]

SIMPLE: dict[str, Any] = {"order": "listed", "at_once": 1, "patience": 0}

HEALTHY = GradientStats(norm=0.1, rms=0.01, vanished=0.5, exploded=0.0)
DEAD = GradientStats(norm=0.0, rms=0.0, vanished=1.0, exploded=0.0)


@pytest.fixture(scope="module")
def pool(make_pool: MakePool) -> HostPool:
    return make_pool(1, horizon=16, objective=ObjectiveConfig(price=0.1))


@pytest.fixture(autouse=True)
def new_episode(pool: HostPool) -> None:
    pool.reset([0])


def started(pool: HostPool, **settings: Any) -> HillClimbing:
    rule = HillClimbing(ClimbingConfig(**(SIMPLE | settings)))
    rule.reset(pool)
    return rule


def decision(rule: HillClimbing, pool: HostPool) -> Row:
    return tuple(int(head) for head in rule.act(pool))


def play_until_probation(rule: HillClimbing, pool: HostPool, slot: int = 0) -> None:
    """Play until the seed in `slot` is blended in."""
    while pool.envs[0].slots[slot].stage is not Stage.PROBATIONARY:
        pool.step(rule.act(pool))


def price_of(pool: HostPool, slot: int, blueprint: str) -> float:
    """Return the accuracy points that this seed must contribute on a host without fossilized seeds, computed by
    hand."""
    place = pool.envs[0].slots[slot]
    return 100 * 0.1 * math.log(1 + get_blueprint(blueprint, place.layout).parameters(place.width) / 390)


@pytest.mark.parametrize(("above", "expected"), [(0.01, fossilize(0)), (0.0, cull(0)), (-0.01, cull(0))])
def test_a_seed_is_kept_if_it_contributes_more_than_its_rent(pool: HostPool, above: float, expected: Row) -> None:
    rule = started(pool, blueprints=["conv_light"])
    play_until_probation(rule, pool)

    pool.envs[0].records[0].contribution = price_of(pool, 0, "conv_light") + above - 1e-6

    assert decision(rule, pool) == expected


def test_rent_is_that_of_growing_further_not_of_growing_from_scratch(pool: HostPool) -> None:
    rule = started(pool, blueprints=["conv_light"])
    play_until_probation(rule, pool)
    pool.envs[0].records[0].contribution = 99.0
    pool.step(rule.act(pool))
    play_until_probation(rule, pool, slot=1)

    # The second seed is expensive on a bare host; after a first growth the same parameters cost less.
    pool.envs[0].records[1].contribution = 0.97 * price_of(pool, 1, "conv_light")

    assert decision(rule, pool) == fossilize(1)


@pytest.mark.parametrize(
    "objective", [ObjectiveConfig(), ObjectiveConfig(price=0.0, price_to=0.5), ObjectiveConfig(compute_price=0.2)]
)
def test_the_rent_that_a_seed_is_judged_by_is_the_one_that_the_pool_charges(
    make_pool: MakePool, objective: ObjectiveConfig
) -> None:
    charging = make_pool(2, horizon=16, objective=objective)
    rule = started(charging, blueprints=["conv_light"])
    play_until_probation(rule, charging)
    for env in charging.envs:
        env.records[0].contribution = 0.0
    judged = [net_gain(env, 0, objective) for env in charging.envs]

    charged = charging.step(act(fossilize(0), fossilize(0))).metrics

    torch.testing.assert_close(charged.objective - charged.accuracy, torch.tensor(judged), atol=1e-6, rtol=1e-5)
    assert max(judged) < 0.0


def test_a_margin_is_asked_for_on_top_of_the_rent(pool: HostPool) -> None:
    rule = started(pool, blueprints=["conv_light"], margin=0.02)
    play_until_probation(rule, pool)

    pool.envs[0].records[0].contribution = price_of(pool, 0, "conv_light") + 1.9
    assert decision(rule, pool) == cull(0)
    pool.envs[0].records[0].contribution = price_of(pool, 0, "conv_light") + 2.1
    assert decision(rule, pool) == fossilize(0)


@pytest.mark.parametrize("patience", [0, 2])
def test_a_seed_that_adds_too_little_is_given_as_long_as_patience_says(pool: HostPool, patience: int) -> None:
    rule = started(pool, patience=patience)
    play_until_probation(rule, pool)

    for _ in range(patience):
        pool.envs[0].records[0].contribution = -1.0
        assert decision(rule, pool) == WAIT
        pool.step(act(WAIT))
    pool.envs[0].records[0].contribution = -1.0
    assert decision(rule, pool) == cull(0)


def test_a_seed_that_earns_its_rent_and_yet_may_not_be_kept_is_culled_after_patience(make_pool: MakePool) -> None:
    strict = make_pool(1, horizon=16, lifecycle=replace(SMALL.lifecycle, min_contribution=50.0))
    rule = started(strict, blueprints=["norm"], patience=1)
    play_until_probation(rule, strict)
    strict.envs[0].records[0].contribution = 40.0
    assert decision(rule, strict) == WAIT
    strict.step(act(WAIT))
    strict.envs[0].records[0].contribution = 40.0

    assert decision(rule, strict) == cull(0)


def test_a_contribution_that_is_no_number_is_none(pool: HostPool) -> None:
    rule = started(pool)
    play_until_probation(rule, pool)
    pool.envs[0].records[0].contribution = float("nan")

    assert decision(rule, pool) == cull(0)


@pytest.mark.parametrize(
    ("zero_gradient", "gradient", "expected"),
    [(True, DEAD, cull(0)), (True, HEALTHY, WAIT), (False, DEAD, WAIT), (True, None, WAIT)],
)
def test_a_seed_that_no_gradient_reaches_is_culled_at_once_if_asked(
    pool: HostPool, zero_gradient: bool, gradient: GradientStats | None, expected: Row
) -> None:
    rule = started(pool, zero_gradient=zero_gradient)
    pool.step(rule.act(pool))
    assert pool.envs[0].slots[0].stage is Stage.TRAINING

    pool.envs[0].records[0].gradient = gradient

    assert decision(rule, pool) == expected


def test_with_the_zero_gradient_rule_living_seeds_of_every_blueprint_are_left_alone(make_pool: MakePool) -> None:
    pool = make_pool(3, actions=ActionConfig(tempos={"FAST": 1}))
    every = pool.space.blueprint
    for first in range(0, len(every), 3):
        pool.reset([1, 2, 3])
        rule = started(pool, zero_gradient=True)
        pool.step(act(*[germinate(2, min(first + i, len(every) - 1)) for i in range(3)]))
        assert Op.CULL not in rule.act(pool).op.tolist(), every[first : first + 3]


def germinations(rule: HillClimbing, pool: HostPool) -> list[Row]:
    """Return the germinations of an episode in which no seed has a net gain."""
    found = []
    for _ in range(pool.config.horizon):
        for record in pool.envs[0].records:
            record.contribution = None if record.contribution is None else -1.0
        row = decision(rule, pool)
        found += [row] * (row[0] == Op.GERMINATE)
        pool.step(act(row))
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [germinate(0, 0), germinate(1, 0), germinate(2, 0)]),
        ({"last_slot_first": True}, [germinate(2, 0), germinate(1, 0), germinate(0, 0)]),
        ({"blueprints": ["conv_light", "norm"]}, [germinate(0, 2), germinate(1, 2), germinate(2, 2)]),
        ({"order": "dearest"}, [germinate(2, 2), germinate(1, 2), germinate(2, 1)]),
        ({"order": "cheapest"}, [germinate(0, 0), germinate(1, 0), germinate(0, 1)]),
    ],
)
def test_seeds_are_tried_in_the_order_of_the_settings(
    pool: HostPool, settings: dict[str, Any], expected: list[Row]
) -> None:
    assert germinations(started(pool, **settings), pool)[:3] == expected


def test_what_was_tried_comes_again_when_nothing_else_is_possible(make_pool: MakePool) -> None:
    pool = make_pool(1, horizon=20)

    rows = germinations(started(pool, blueprints=["norm"]), pool)

    assert rows == [germinate(0), germinate(1), germinate(2), germinate(0), germinate(1)]


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_no_more_seeds_grow_at_once_than_asked(pool: HostPool, at_once: int) -> None:
    rule = started(pool, at_once=at_once)
    most = 0
    for _ in range(pool.config.horizon):
        pool.step(rule.act(pool))
        most = max(most, sum(slot.live for slot in pool.envs[0].slots))

    assert most == at_once


@pytest.mark.parametrize("training_ticks", [0, 1, 3])
@pytest.mark.parametrize("tempo", [1, 3])
def test_a_seed_is_begun_while_it_can_be_judged_and_no_later(
    make_pool: MakePool, training_ticks: int, tempo: int
) -> None:
    lifecycle = replace(SMALL.lifecycle, training_ticks=training_ticks)
    needed = min_ticks_to_judge(lifecycle, tempo)
    actions = ActionConfig(blueprints=["norm"], tempos={"SLOW": tempo + 1, "FAST": tempo})
    just = make_pool(1, horizon=needed + 1, lifecycle=lifecycle, actions=actions)
    short = make_pool(1, horizon=needed, lifecycle=lifecycle, actions=actions)

    assert decision(started(short), short) == WAIT
    rule = started(just)
    assert decision(rule, just) == germinate(0, tempo=1)
    just.step(act(germinate(0, tempo=1)))
    while just.envs[0].tick < needed:
        assert decision(rule, just) == WAIT
        just.step(act(WAIT))
    assert decision(rule, just) in (fossilize(0), cull(0)), "in the last tick it is judged"


@pytest.mark.parametrize("changes", [{}, FREE, FREE | {"lifecycle": replace(FREE["lifecycle"], min_contribution=1.0)}])
@pytest.mark.parametrize("at_once", rest_is_slow([1, 3], {3}))
def test_no_mask_is_ever_broken(make_pool: MakePool, changes: dict[str, Any], at_once: int) -> None:
    pool = make_pool(3, **(changes | {"objective": ObjectiveConfig(price=0.0)}))
    rule = HillClimbing(ClimbingConfig(at_once=at_once, patience=0, zero_gradient=True))
    ops = set()
    pool.reset([1, 2, 3])
    rule.reset(pool)
    for _ in range(pool.config.horizon):
        action = rule.act(pool)
        ops |= set(action.op.tolist())
        pool.step(action)  # raises if the action is masked

    assert {Op.GERMINATE, Op.CULL} <= ops


def test_blueprints_that_are_not_on_offer_are_refused(pool: HostPool) -> None:
    with pytest.raises(
        ValueError, match=r"climbing.blueprints: 'conv_lite' is not available; did you mean 'conv_light'"
    ):
        list_candidates(pool, ClimbingConfig(blueprints=["conv_lite"]))


@pytest.mark.parametrize("bad", [{"at_once": 0}, {"patience": -1}, {"blueprints": []}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"climbing.{next(iter(bad))}"):
        ClimbingConfig(**bad)
