"""Transfers between device and CPU in one environment step."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import HostPool
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.measurements import download
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig
from esper_lightning.ppo.policy import Policy
from esper_lightning.ppo.running_norm import RunningMeanStd, make_norm
from esper_lightning.tasks import Digits
from esper_lightning.telemetry.observer import observe
from tests.conftest import SMALL, small_host


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("executor", ["loop", "streams", "fused"])
def test_nothing_in_a_tick_waits_for_the_gpu_but_the_two_reads(
    monkeypatch: pytest.MonkeyPatch, make_policy: Callable[..., Policy], executor: str
) -> None:
    """S3: a step waits for the GPU only in its two transfers. Torch raises an error at any other synchronisation, also
    at copies from pageable memory."""
    gpu, task = torch.device("cuda", 0), Digits(validation=100, test=100)
    config, governor = replace(SMALL, executor=executor), GovernorConfig()
    pool = HostPool(task, task.load(), small_host, config=config, n_envs=3, device=gpu, governor=governor)
    norms = make_norm(pool.rows).to(gpu), RunningMeanStd((), clip=float("inf")).to(gpu)
    loop = RolloutCollector(
        pool,
        make_policy(pool).to(gpu),
        observation_norm=norms[0],
        value_norm=norms[1],
        config=PPOConfig(),
        run_rng_seed=7,
    )
    loop.reset()
    loop.step()  # creates what is cached
    shapes = []

    def read(tensor: Tensor) -> Tensor:
        torch.cuda.set_sync_debug_mode("default")
        shapes.append(tuple(tensor.shape))
        numbers = download(tensor)
        torch.cuda.set_sync_debug_mode("error")
        return numbers

    monkeypatch.setattr("esper_lightning.envs.host_pool.download", read)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(pool.config.horizon - 1):
            observe(pool, loop.step(), loop.ticks)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert [len(shape) for shape in shapes] == [2, 2] * (pool.config.horizon - 1)
    assert loop.buffer.steps.action.op.any(), "something was done"
