"""Host pool on a GPU; skipped without one."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import HostPool, Overseer
from esper_lightning.governor.judge import GovernorConfig
from esper_lightning.tasks import Digits
from tests.conftest import SMALL, small_host

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def make_pool(others: Sequence[torch.device] = (), **changes: str) -> HostPool:
    task = Digits(validation=100, test=100)
    return HostPool(
        task,
        task.load(),
        small_host,
        config=replace(SMALL, **changes),
        n_envs=3,
        device=torch.device("cuda"),
        extra_devices=others,
        overseer=Overseer(GovernorConfig()),
    )


@pytest.mark.parametrize("executor", ["loop", "streams"])
def test_an_episode_runs_on_a_gpu_and_its_rewards_sum_to_the_change_of_the_objective(executor: str) -> None:
    pool = make_pool(executor=executor)
    wanderer = RandomValid(0)
    pool.reset([1, 2, 3])
    before = torch.tensor([env.objective for env in pool.envs])

    steps = [pool.step(wanderer.act(pool)) for _ in range(pool.config.horizon)]

    assert {part.device.type for step in steps for part in (*step.observation, step.reward, *step.masks)} == {"cuda"}
    total = torch.stack([step.reward for step in steps]).sum(0).cpu()
    torch.testing.assert_close(total, steps[-1].metrics.objective - before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_hosts_on_two_gpus_live_as_on_one() -> None:
    both, one = make_pool([torch.device("cuda", 1)], executor="streams"), make_pool(executor="streams")
    lives = []
    for pool in (both, one):
        wanderer = RandomValid(0)
        pool.reset([1, 2, 3])
        lives.append([pool.step(wanderer.act(pool)).metrics for _ in range(pool.config.horizon)])

    assert [env.slots[0].alpha.device.index for env in both.envs] == [0, 1, 0]
    for ours, theirs in zip(*lives, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("executor", ["loop", "streams"])
def test_time_on_a_gpu_is_told_by_events_and_adds_up_to_what_has_passed(executor: str) -> None:
    pool, wanderer = make_pool(executor=executor), RandomValid(0)
    pool.reset([1, 2, 3])
    pool.step(wanderer.act(pool))
    pool.clock.take_seconds()
    begin = time.perf_counter()
    pool.step(wanderer.act(pool))
    torch.cuda.synchronize()
    passed = time.perf_counter() - begin

    seconds = pool.clock.take_seconds()
    assert pool.clock.timer.name == "cuda_events"
    assert 0.5 * passed < sum(seconds.values()) < 1.1 * passed
    assert all(seconds[phase] > 0.0 for phase in ("data", "train", "validate", "bookkeeping"))


def test_worker_threads_are_refused_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="'threads' runs on the CPU"):
        make_pool(executor="threads")
