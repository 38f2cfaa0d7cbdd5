"""Host epochs of a number of FLOPs: larger hosts train on fewer minibatches, and nothing of the budget is lost."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch

from esper_lightning.envs import HostPool
from esper_lightning.envs.executors import StreamsExecutor
from esper_lightning.envs.family import FamilyConfig
from esper_lightning.envs.host_training import HostTraining
from tests.decisions import WAIT, act, cull, fossilize, germinate
from tests.envs.episodes import MakePool, breaking_epoch
from tests.envs.executors.fake_cuda import FakeCuda

ACTIONS = [
    [germinate(1, 1), WAIT],
    [WAIT, germinate(0, 2)],
    [germinate(0, 1), WAIT],
    [fossilize(1), cull(0)],
    [WAIT, WAIT],
    [WAIT, germinate(1, 1)],
]


def budget(pool: HostPool, batches: float) -> HostTraining:
    """Return a training whose epochs have the FLOPs of this number of minibatches of an empty host."""
    host = pool.envs[0]
    return HostTraining(flops=batches * host.flops.of_step([]) * host.training.batch_size, lr=0.02)


def play(pool: HostPool) -> tuple[list[list[int]], list[list[int]]]:
    """Play the actions; return minibatches and FLOPs of each tick, host by host."""
    counts: list[list[int]] = [[] for _ in pool.envs]
    flops: list[list[int]] = [[] for _ in pool.envs]

    def count(host: int, batches: Any) -> None:
        env = pool.envs[host]
        counts[host].append(len(batches.indices))
        flops[host].append(env.flops.of_step(env.slots) * batches.indices.numel())

    for host, env in enumerate(pool.envs):
        env.on_batches = partial(count, host)
    for rows in ACTIONS:
        pool.step(act(*rows))
    return counts, flops


@pytest.fixture
def make_budgeted(make_pool: MakePool) -> Callable[..., HostPool]:
    training = budget(make_pool(2), 3.5)
    return lambda **settings: make_pool(2, training=training, **settings)


def test_every_executor_spends_the_budget_to_one_minibatch_whatever_has_grown(
    make_budgeted: Callable[..., HostPool], fake_cuda: FakeCuda
) -> None:
    played = {}
    for executor in ("loop", "threads", "fused", "streams"):
        pool = make_budgeted(executor="loop" if executor == "streams" else executor)
        if executor == "streams":  # on fake ones
            pool.executor = StreamsExecutor(pool.task, pool.config.training)
        pool.reset([1, 3])
        counts, flops = play(pool)
        per_tick = pool.config.training.flops
        assert per_tick is not None
        for env, of_ticks, batches in zip(pool.envs, flops, counts, strict=True):
            for tick, (spent, number) in enumerate(zip(accumulate(of_ticks), batches, strict=True), 1):
                assert 0.0 <= tick * per_tick - spent < of_ticks[tick - 1] / number, "less than one minibatch is left"
            assert env.flops_spent == sum(of_ticks)
        weights = [value for env in pool.envs for value in env.network.state_dict().values()]
        played[executor] = counts, weights

    (counts, loop), (_, threads), _, (_, streams) = played.values()
    assert all(of[0] == counts for of in played.values()), "the same minibatches"
    assert counts[0][:2] != counts[1][:2] and len(set(counts[1])) > 1, "hosts differ, and so do ticks"
    for others in (threads, streams):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(loop, others, strict=True))


def test_hosts_of_a_family_may_have_other_budgets(make_pool: MakePool) -> None:
    small, large = (budget(make_pool(2), batches).flops for batches in (2, 6))
    family = FamilyConfig(train=[{"training.flops": [small, large]}])
    pool = make_pool(8, training=HostTraining(lr=0.02), family=family)
    pool.reset(range(8))
    pool.step(act(*[WAIT] * 8))

    assert {env.flops_spent for env in pool.envs} == {small, large}


def test_an_epoch_that_was_rolled_back_has_cost_its_flops(make_budgeted: Callable[..., HostPool]) -> None:
    pool = make_budgeted()
    pool.reset([1, 3])
    sound, broken = pool.envs
    with breaking_epoch(pool, [1]):
        step = pool.step(act(WAIT, WAIT))

    assert [verdict.host for verdict in step.verdicts] == [1]
    assert broken.flops_spent == sound.flops_spent > 0 and broken.tick == sound.tick == 1


def test_the_rate_of_the_schedule_decay_falls_over_the_last_fifth() -> None:
    training = HostTraining(lr_schedule="decay")

    assert [training.lr_share(share) for share in (0.0, 0.5, 0.8, 0.9, 1.0)] == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0])


def test_a_family_has_budgets_in_all_its_contexts_or_in_none(make_pool: MakePool) -> None:
    flops = budget(make_pool(1), 3.5).flops
    some = [{"training.flops": [flops]}, {"training.lr": [0.02]}]
    for family in (FamilyConfig(train=some), FamilyConfig(train=some[:1], held_out=some[1:])):
        with pytest.raises(ValueError, match=r"some contexts have training\.flops and others none"):
            make_pool(1, training=HostTraining(), family=family)
