"""The same pool on a GPU; skipped where there is none."""

from dataclasses import replace

import pytest
import torch

from esper_lightning.envs import HostPool
from esper_lightning.tamiyo.baselines import RandomValid
from esper_lightning.tasks import Digits
from tests.conftest import SMALL, small_host

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def make_pool(**changes: str) -> HostPool:
    task = Digits(validation=100, test=100)
    return HostPool(task, task.load(), small_host, replace(SMALL, **changes), 3, torch.device("cuda"))


def test_an_episode_runs_on_a_gpu_and_its_rewards_sum_to_the_change_of_the_objective() -> None:
    pool = make_pool()
    wanderer = RandomValid(0)
    pool.reset([1, 2, 3])
    before = torch.tensor([env.objective for env in pool.envs])

    steps = [pool.step(wanderer.act(pool)) for _ in range(pool.config.horizon)]

    assert {part.device.type for step in steps for part in (*step.observation, step.reward, *step.masks)} == {"cuda"}
    total = torch.stack([step.reward for step in steps]).sum(0).cpu()
    torch.testing.assert_close(total, steps[-1].metrics.objective - before)


def test_worker_threads_are_refused_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="'threads' runs on the CPU"):
        make_pool(executor="threads")
