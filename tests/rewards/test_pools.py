"""Every reward mode on real hosts: the reward is that of the measured events in any case."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.rewards import REWARDS, RewardConfig
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import Split
from tests.conftest import FREE
from tests.decisions import WAIT, act, cull, fossilize, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch
from tests.rewards.ticks import ALL, term_bounds

LEARNS = HostTraining(lr=0.02, batches=8)


@pytest.fixture(scope="module")
def pool_of(make_pool: Callable[..., HostPool]) -> Callable[..., HostPool]:
    """Return `pool_of(mode, n_envs, …)`, which makes a small pool rewarded by `mode`."""

    def make(mode: str, n_envs: int = 3, **changes: Any) -> HostPool:
        return make_pool(n_envs, reward=RewardConfig(mode=mode), **changes)

    return make


@pytest.mark.parametrize("mode", ALL)
def test_terms_sum_to_the_reward_and_stay_within_their_bounds(mode: str, pool_of: Callable[..., HostPool]) -> None:
    pool, wanderer = pool_of(mode, **FREE), RandomValid(5)
    config = pool.config.reward
    for episode in range(2):
        pool.reset([3 * episode, 3 * episode + 1, 3 * episode + 2])
        for _ in range(pool.config.horizon):
            step = pool.step(wanderer.act(pool))
            assert list(step.terms) == [*REWARDS[mode].terms, "rollback"]
            torch.testing.assert_close(sum(step.terms.values()).float(), step.reward, rtol=0.0, atol=1e-6)
            assert torch.equal(step.reward, step.metrics.reward)
            for name, bound in term_bounds(config, 3).items():
                assert step.terms[name].abs().max() <= bound, name


@pytest.mark.slow
def test_the_reward_of_a_fossilized_seed_is_given_at_once_and_sums_to_the_same(
    pool_of: Callable[..., HostPool],
) -> None:
    pools = [pool_of(mode, training=LEARNS, horizon=len(FOSSILIZE_CULL_AND_LATE)) for mode in ("kept", "objective")]
    for pool in pools:
        pool.reset([1, 2, 3])
    worth = [[env.validated.fossilized.score for env in pools[0].envs]]  # nothing is fossilized, so no rent
    kept, change = [], []
    for rows in FOSSILIZE_CULL_AND_LATE:
        ours, theirs = (pool.step(act(*rows)) for pool in pools)
        kept.append(ours.reward.clone())
        change.append(theirs.reward.clone())
        worth.append([env.objective_at(env.validated.fossilized.score) for env in pools[0].envs])
    torch.testing.assert_close(torch.stack(kept), torch.tensor(worth).diff(dim=0), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(torch.stack(kept).sum(0), torch.stack(change).sum(0), rtol=0.0, atol=1e-6)
    assert not torch.equal(torch.stack(kept), torch.stack(change))


FOSSILIZE_CULL_AND_LATE = [  # one seed is fossilized, one is culled, one is fossilized too late
    [germinate(0, 2), germinate(0, 2), germinate(0, 2)],
    *[[WAIT] * 3] * 5,
    [fossilize(0), cull(0), WAIT],
    *[[WAIT] * 3] * 3,
]


@torch.no_grad()
def right_answers(network: nn.Module, data: Split) -> float:
    return (network(data.inputs).argmax(1) == data.targets).double().mean().item()


def test_shaped_alone_knows_the_host_without_any_seed(pool_of: Callable[..., HostPool]) -> None:
    pool = pool_of("shaped", 1, training=LEARNS, horizon=20)
    pool.reset([1])
    for row in (germinate(0, 2), WAIT, WAIT, WAIT, fossilize(0), germinate(1, 2), *[WAIT] * 5):
        pool.step(act(row))
    (env,) = pool.envs
    whole, bare, kept = (getattr(env.validated, name).score for name in ("all_seeds", "host_only", "fossilized"))
    for empty, known in ((set(Stage), bare), (set(Stage) - {Stage.FOSSILIZED}, kept), (set(), whole)):
        network = deepcopy(env.network).eval()
        for slot in slots_of(network).values():
            if slot.stage in empty:
                slot.empty()
        assert right_answers(network, pool.data.validation) == pytest.approx(known)
    assert len({whole, bare, kept}) == 3, "they differ, so the test can tell them apart"
    assert len(env.variants()) == 6
    assert len(pool_of("objective", 1).envs[0].variants()) == 5


def test_a_seed_is_rewarded_by_its_contribution(pool_of: Callable[..., HostPool]) -> None:
    pool = pool_of("shaped", 1, training=LEARNS, horizon=20)
    pool.reset([1])
    for row in (germinate(0, 2), germinate(1, 2), *[WAIT] * 5):  # until no ramp moves any more
        pool.step(act(row))
    (env,) = pool.envs

    def points(without: str | None = None) -> float:
        network = deepcopy(env.network).eval()
        if without is not None:
            slots_of(network)[without].empty()
        return 100.0 * right_answers(network, pool.data.validation)

    then = [points() - points(without=slot.name) for slot in env.slots]
    pool.step(act(WAIT))
    now = [points() - points(without=slot.name) for slot in env.slots]
    ticks = env.reward_step(diverged=False).slots
    assert [tick.contribution_before for tick in ticks] == pytest.approx(then, abs=1e-3)
    assert [tick.contribution for tick in ticks] == pytest.approx(now, abs=1e-3)
    assert then != now and all(now[:2]) and now[2] == 0.0
    seeds = [sum(part.numel() for part in slot.seed.parameters()) for slot in env.slots]
    assert [tick.parameters for tick in ticks] == seeds and all(seeds[:2]) and seeds[2] == 0
    assert [tick.growth * env.host_parameters for tick in ticks] == pytest.approx(seeds)


@pytest.mark.parametrize("mode", ALL)
def test_a_rollback_ends_the_trajectory_with_its_penalty_and_closed_accounts(
    mode: str, pool_of: Callable[..., HostPool]
) -> None:
    pool = pool_of(mode, 2, training=LEARNS, horizon=10, governor=ONLY_NAN_DIVERGES)
    pool.reset([1, 2])
    steps = [pool.step(act(*rows)) for rows in ([germinate(0, 2)] * 2, *[[WAIT] * 2] * 4)]
    lent = {name: sum(step.terms[name][0].item() for step in steps) for name in steps[0].terms}
    with breaking_epoch(pool, [0]):
        step = pool.step(act(WAIT, WAIT))
    assert step.terminated.tolist() == [True, False]
    paid = {name: values[0].item() for name, values in step.terms.items()}
    taken_back = {name: -lent[name] for name in REWARDS[mode].taken_back}
    assert paid == pytest.approx(dict.fromkeys(paid, 0.0) | taken_back | {"rollback": -0.75})
    assert step.reward[0].item() == pytest.approx(sum(paid.values()))
    # A new trajectory begins: for the seeds that were alive nothing is paid or taken back any more.
    after = pool.step(act(WAIT, WAIT))
    assert {name: after.terms[name][0].item() for name in taken_back} == dict.fromkeys(taken_back, 0.0)


@pytest.mark.parametrize("mode", ALL)
def test_a_host_whose_episode_is_over_gets_no_reward(mode: str, pool_of: Callable[..., HostPool]) -> None:
    pool = pool_of(mode, 1, governor=ONLY_NAN_DIVERGES)
    pool.reset([1])
    pool.step(act(germinate(0, 2)))
    for _ in range(ONLY_NAN_DIVERGES.max_rollbacks + 1):
        with breaking_epoch(pool, [0]):
            pool.step(act(WAIT))
    assert pool.envs[0].ended
    for _ in range(pool.config.horizon - pool.envs[0].tick):
        assert pool.step(act(WAIT)).reward.item() == 0.0
