from collections import Counter
from collections.abc import Callable

import pytest
import torch

from esper_lightning.controllers.random import RandomValid, WaitOnly
from esper_lightning.envs import HEADS, ActionConfig, HostPool, Op
from esper_lightning.envs.spaces.actions import RELEVANT_OPS
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.stages import Stage
from tests.decisions import WAIT, Row, act, germinate


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., HostPool]) -> HostPool:
    return make_pool(3)


def decisions(pool: HostPool, controller: RandomValid | WaitOnly, episodes: int = 1) -> list[Row]:
    """Play whole episodes and return the actions; the pool raises if an action is not legal."""
    taken = []
    for episode in range(episodes):
        pool.reset([3 * episode + i for i in range(3)])
        controller.reset(pool)
        for _ in range(pool.config.horizon):
            action = controller.act(pool)
            rows = list(zip(*(head.tolist() for head in action), strict=True))
            assert all(pool.masks.allows(i, row) for i, row in enumerate(rows))
            taken += rows
            pool.step(action)
    return taken


def test_waiting_grows_nothing(pool: HostPool) -> None:
    assert set(decisions(pool, WaitOnly())) == {WAIT}
    assert all(slot.stage is Stage.DORMANT for env in pool.envs for slot in env.slots)
    assert pool.parameter_counts.tolist() == [390] * 3


def test_random_decisions_are_legal_and_of_every_kind(pool: HostPool) -> None:
    taken = decisions(pool, RandomValid(0), episodes=4)

    choices = dict(zip(HEADS, zip(*taken, strict=True), strict=True))
    for head, choices_of_head in choices.items():
        matters = [
            choice for op, choice in zip(choices["op"], choices_of_head, strict=True) if op in RELEVANT_OPS[head]
        ]
        others = [
            choice for op, choice in zip(choices["op"], choices_of_head, strict=True) if op not in RELEVANT_OPS[head]
        ]
        assert set(matters or [0]) == set(range(pool.space.sizes[head])), head
        assert not any(others), "what does not matter is 0"


def test_random_decisions_are_reproducible_by_seed(pool: HostPool) -> None:
    assert decisions(pool, RandomValid(5)) == decisions(pool, RandomValid(5))
    assert decisions(pool, RandomValid(5)) != decisions(pool, RandomValid(6))


def test_every_episode_goes_on_in_the_stream_of_random_numbers(pool: HostPool) -> None:
    controller = RandomValid(5)

    assert decisions(pool, controller) != decisions(pool, controller)


def test_a_random_op_is_drawn_first_and_evenly(make_pool: Callable[..., HostPool]) -> None:
    # Germination is possible in three slots and waiting in one way only, yet both ops are equally likely.
    fresh, controller = make_pool(50), RandomValid(0)
    ops = Counter(op for _ in range(20) for op in controller.act(fresh).op.tolist())

    assert set(ops) == {Op.WAIT, Op.GERMINATE}
    assert ops[Op.WAIT] == pytest.approx(500, abs=5 * (1000 * 0.25) ** 0.5)


def test_a_random_choice_where_nothing_is_left_is_to_wait(make_pool: Callable[..., HostPool]) -> None:
    young = LifecycleConfig(training_ticks=1, min_cull_age=3)
    pool = make_pool(2, lifecycle=young, actions=ActionConfig(blueprints=["norm"], tempos={"FAST": 1}, max_seeds=1))
    pool.step(act(germinate(2), germinate(2)))
    assert pool.masks.forced.all()

    assert all(torch.equal(head, torch.zeros(2, dtype=torch.int64)) for head in RandomValid(1).act(pool))
