"""Heuristic baseline on hand-written histories."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from esper_lightning.controllers.heuristic import Heuristic, HeuristicConfig, is_worth_fossilizing
from esper_lightning.envs import ActionConfig, HostPool, Op
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.stages import Stage
from tests.decisions import WAIT, act, fossilize, germinate

FLAT = [0.5] * 9  # validation accuracy of a host on a plateau
STABLE = [2.0] * 9  # validation loss of a stable host


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., HostPool]) -> HostPool:
    lifecycle = LifecycleConfig(training_ticks=0, min_contribution=1.0, auto_cull=False, embargo_ticks=1)
    blueprints = ActionConfig(blueprints=["norm", "conv_small", "conv_light"], tempos={"FAST": 1, "SLOW": 2})
    made = make_pool(1, horizon=40, lifecycle=lifecycle, actions=blueprints)
    made.reset([0])
    return made


@pytest.fixture(autouse=True)
def new_episode(pool: HostPool) -> None:
    pool.reset([0])


def started(pool: HostPool, **settings: Any) -> Heuristic:
    rule = Heuristic(HeuristicConfig(**settings))
    rule.reset(pool)
    return rule


def set_measurements(
    pool: HostPool, accuracy: list[float], loss: list[float] | None = None, slot: int = 0, **seed: float
) -> None:
    """Overwrite the measurements; `contribution` and `ticks` (in the stage) belong to the seed in `slot`."""
    state = deepcopy(pool.state_dict())
    env = state["envs"][0]["template"]
    env["history"]["accuracy"], env["history"]["loss"] = accuracy, loss or STABLE[: len(accuracy)]
    env["tick"] = len(accuracy) - 1
    if "contribution" in seed:
        env["growing"]["records"][slot][0] = seed["contribution"]
    pool.load_state_dict(state)
    if "ticks" in seed:
        pool.envs[0].slots[slot].ticks_in_stage = int(seed["ticks"])


def decision(rule: Heuristic, pool: HostPool) -> tuple[int, ...]:
    return tuple(int(head) for head in rule.act(pool))


def take(pool: HostPool, row: tuple[int, ...]) -> None:
    pool.step(act(row))


def grow_until_probation(rule: Heuristic, pool: HostPool, slot: int = 0) -> tuple[int, ...]:
    """Let the rule germinate on a plateau, and continue until the seed is on probation."""
    set_measurements(pool, FLAT)
    row = decision(rule, pool)
    assert row[:2] == (Op.GERMINATE, slot)
    take(pool, row)
    while pool.envs[0].slots[slot].stage is not Stage.PROBATIONARY:
        assert decision(rule, pool) == WAIT, "one seed grows at a time"
        take(pool, WAIT)
    return row


def test_it_germinates_on_a_plateau_of_a_stable_host(pool: HostPool) -> None:
    set_measurements(pool, FLAT)

    assert decision(started(pool), pool) == germinate(0)


@pytest.mark.parametrize(
    ("accuracy", "loss", "why"),
    [
        (FLAT, [2.0 * 0.9**t for t in range(9)], "the loss still falls"),
        (FLAT, [2.0] * 6 + [1.9, 1.9, 1.9], "the loss fell two ticks ago"),
        ([0.5 + 0.01 * t for t in range(9)], STABLE, "accuracy still rises"),
        ([0.5] * 6 + [0.51] * 3, STABLE, "accuracy rose two ticks ago"),
        (FLAT[:5], STABLE[:5], "the host is too young"),
        (FLAT[:3], STABLE[:3], "there is no history"),
        (FLAT, [float("nan")] * 9, "the loss is not a number"),
    ],
)
def test_it_waits_for_a_better_moment(pool: HostPool, accuracy: list[float], loss: list[float], why: str) -> None:
    set_measurements(pool, accuracy, loss)

    assert decision(started(pool), pool) == WAIT, why


def test_a_host_that_was_stable_once_may_be_grown_though_its_loss_moves_again(pool: HostPool) -> None:
    rule = started(pool)
    set_measurements(pool, [0.5 + 0.01 * t for t in range(9)], STABLE)
    assert decision(rule, pool) == WAIT

    set_measurements(pool, FLAT, [2.0 * 0.9**t for t in range(9)])
    assert decision(rule, pool)[0] == Op.GERMINATE


def test_a_new_episode_forgets_the_last_one(pool: HostPool) -> None:
    rule = started(pool)
    set_measurements(pool, FLAT)
    decision(rule, pool)
    decision(rule, pool)

    rule.reset(pool)
    set_measurements(pool, FLAT, [2.0 * 0.9**t for t in range(9)])
    assert decision(rule, pool) == WAIT, "stability must be observed again"
    set_measurements(pool, FLAT)
    assert decision(rule, pool)[2] == 0, "the rotation begins at the first blueprint"


@pytest.mark.parametrize(("contribution", "op"), [(0.99, Op.WAIT), (1.0, Op.FOSSILIZE), (7.0, Op.FOSSILIZE)])
def test_it_fossilizes_at_the_gates_threshold(pool: HostPool, contribution: float, op: Op) -> None:
    rule = started(pool)
    grow_until_probation(rule, pool)
    set_measurements(pool, FLAT, contribution=contribution)

    assert decision(rule, pool)[:2] == (op, 0)


@pytest.mark.parametrize(
    ("threshold", "contribution", "keeps"),
    [(1.0, None, False), (1.0, 0.5, False), (-1.0, -0.5, True), (None, 0.0, False), (None, 0.1, True)],
)
def test_without_a_threshold_whatever_helps_is_worth_keeping(
    threshold: float | None, contribution: float | None, keeps: bool
) -> None:
    assert is_worth_fossilizing(contribution, LifecycleConfig(min_contribution=threshold)) is keeps


def test_blueprints_take_turns(pool: HostPool) -> None:
    rule = started(pool)
    met = []
    for slot in range(3):
        met.append(grow_until_probation(rule, pool, slot)[2])
        set_measurements(pool, FLAT, slot=slot, contribution=2.0)
        assert decision(rule, pool) == fossilize(slot)
        take(pool, fossilize(slot))

    assert met == [0, 1, 2]
    set_measurements(pool, FLAT)
    assert decision(rule, pool) == WAIT, "every slot is taken"


@pytest.mark.parametrize(
    ("accuracy", "ticks", "contribution", "op", "why"),
    [
        (0.47, 5, 0.0, Op.CULL, "three points lost, and time enough to recover"),
        (0.47, 4, 0.0, Op.WAIT, "it has not had its time yet"),
        (0.485, 9, 0.0, Op.WAIT, "one point and a half is no harm"),
        (0.497, 1, 0.2, Op.CULL, "it makes itself needed while the host got worse"),
        (0.499, 1, 0.2, Op.WAIT, "a tenth of a point is no loss"),
        (0.497, 1, 0.05, Op.WAIT, "it does not claim to contribute"),
    ],
)
def test_it_culls_a_seed_that_does_harm(
    pool: HostPool, accuracy: float, ticks: int, contribution: float, op: Op, why: str
) -> None:
    rule = started(pool)
    grow_until_probation(rule, pool)
    set_measurements(pool, [*FLAT, accuracy], [2.0] * 10, ticks=ticks, contribution=contribution)

    assert decision(rule, pool)[:2] == (op, 0), why


def test_a_blueprint_that_was_culled_is_skipped_until_its_penalty_has_faded(pool: HostPool) -> None:
    rule = started(pool, max_penalty=0.6)
    grow_until_probation(rule, pool)
    set_measurements(pool, [*FLAT, 0.4], [2.0] * 10, ticks=9)
    take(pool, decision(rule, pool))
    assert pool.envs[0].slots[0].stage is not Stage.PROBATIONARY

    rule.memories[0].next_blueprint = 0  # the same blueprint is next
    set_measurements(pool, FLAT)
    assert decision(rule, pool)[:3] == (Op.GERMINATE, 1, 1), "penalty 2 has halved to 1: still above 0.6"
    rule.memories[0].next_blueprint = 0
    assert decision(rule, pool)[2] == 0, "a tick later it is 0.5"


def test_whole_episodes_hold_only_legal_actions(make_pool: Callable[..., HostPool]) -> None:
    several = make_pool(3, horizon=16)
    rule = Heuristic(HeuristicConfig(stable_loss=1.0, plateau_points=100.0, min_age=1))  # germinates early
    ops = set()
    for episode in range(2):
        several.reset([3 * episode + i for i in range(3)])
        rule.reset(several)
        for _ in range(several.config.horizon):
            action = rule.act(several)
            ops |= set(action.op.tolist())
            several.step(action)  # raises if the action is not legal

    assert {Op.WAIT, Op.GERMINATE} <= ops and len(ops) > 2


@pytest.mark.parametrize("settings", [{"plateau_ticks": 0}, {"stable_ticks": -1}])
def test_a_rule_without_any_ticks_to_look_at_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        HeuristicConfig(**settings)
