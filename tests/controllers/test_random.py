from collections import Counter
from collections.abc import Callable

import pytest
import torch

from esper_lightning.controllers.rules import RandomValid, WaitOnly
from esper_lightning.envs import HEADS, HostPool, Op
from esper_lightning.envs.actions import RELEVANT_OPS
from tests.controllers.playing import episode


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., HostPool]) -> HostPool:
    return make_pool(3)


def test_waiting_grows_nothing(pool: HostPool) -> None:
    assert not episode(pool, WaitOnly()).any()
    assert pool.parameter_counts.tolist() == [390] * 3


def test_random_decisions_are_legal_of_every_kind_and_reproducible_by_seed(pool: HostPool) -> None:
    controller = RandomValid(0)
    episodes = torch.stack([episode(pool, controller) for _ in range(4)])  # [episodes, T, heads, N]

    ops, *_ = taken = episodes.movedim(2, 0).flatten(1)
    for head, choices in zip(HEADS, taken, strict=True):
        matters = torch.tensor([Op(op) in RELEVANT_OPS[head] for op in ops.tolist()])
        assert set(choices[matters].tolist() or [0]) == set(range(len(getattr(pool.space, head)))), head
        assert not choices[~matters].any(), "what does not matter is 0"
    assert torch.equal(episodes[0], episode(pool, RandomValid(0)))
    assert not torch.equal(episodes[0], episodes[1]), "every episode goes on in the stream of random numbers"
    assert not torch.equal(episodes[0], episode(pool, RandomValid(6)))


def test_a_random_op_is_drawn_first_and_evenly(make_pool: Callable[..., HostPool]) -> None:
    # Germination is possible in three slots and waiting in one way only, yet both ops are equally likely.
    fresh, controller = make_pool(50), RandomValid(0)
    ops = Counter(op for _ in range(20) for op in controller.act(fresh).op.tolist())

    assert set(ops) == {Op.WAIT, Op.GERMINATE}
    assert ops[Op.WAIT] == pytest.approx(500, abs=5 * (1000 * 0.25) ** 0.5)
