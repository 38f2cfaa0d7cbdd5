"""Host pool on a GPU; skipped without one."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.actions import to_action
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.tasks import Digits
from tests.conftest import SMALL, small_host
from tests.envs.executors.fused import hosts
from tests.runs import fit, only_run

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def make_pool(host_devices: Sequence[torch.device] | None = None, **changes: Any) -> HostPool:
    task = Digits(validation=100, test=100)
    return HostPool(
        task,
        task.load(),
        small_host,
        config=replace(SMALL, **changes),
        n_envs=3,
        device=torch.device("cuda"),
        host_devices=host_devices,
        governor=GovernorConfig(),
    )


@pytest.mark.parametrize("executor", ["loop", "streams", "fused"])
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
@pytest.mark.parametrize("executor", ["streams", "fused"])
def test_hosts_on_two_gpus_live_as_on_one(executor: str) -> None:
    both = make_pool([torch.device("cuda", i) for i in range(2)], executor=executor)
    one = make_pool(executor=executor)
    lives = []
    for pool in (both, one):
        wanderer = RandomValid(0)
        pool.reset([1, 2, 3])
        lives.append([pool.step(wanderer.act(pool)).metrics for _ in range(pool.config.horizon)])

    assert [env.slots[0].alpha.device.index for env in both.envs] == [0, 1, 0]
    for ours, theirs in zip(*lives, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("executor", ["loop", "streams", "fused"])
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
    assert pool.clock.name == "cuda_events"
    assert 0.5 * passed < sum(seconds.values()) < 1.1 * passed
    assert all(seconds[phase] > 0.0 for phase in ("train", "bookkeeping"))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("executor", ["loop", "streams", "fused"])
def test_every_executor_trains_in_every_precision(executor: str, precision: str) -> None:
    pool = make_pool(executor=executor, training=replace(SMALL.training, precision=precision, batches=8))
    pool.reset([1, 2, 3])
    before = torch.tensor([env.objective for env in pool.envs])
    wait = to_action([(Op.WAIT,)] * 3, pool.device)

    losses = torch.stack([pool.step(wait).metrics.loss for _ in range(pool.config.horizon)])

    assert losses.isfinite().all() and before.isfinite().all()
    assert (losses[-1] < losses[0]).all()


def test_in_float64_fused_does_what_the_loop_does() -> None:
    pools = [hosts.make(executor, "cnn", device=torch.device("cuda")) for executor in ("loop", "fused")]
    loop, fused = (hosts.play(pool) for pool in pools)

    assert fused.stages == loop.stages
    assert hosts.distance(*pools) < 1e-9


@pytest.mark.parametrize("executor", ["loop", "streams", "fused", "auto"])
def test_a_whole_run_on_a_gpu_ends_with_its_comparison(executor: str, tmp_path: Path) -> None:
    flags = ("--trainer.accelerator", "gpu", "--trainer.devices", "1", "--data.env.executor", executor)
    fit(tmp_path, *flags, "--trainer.max_epochs", "2", "--model.evaluation.hosts", "3")

    run = only_run(tmp_path)
    assert (run.folder / "evaluation" / "evaluation.csv").is_file()
    assert json.loads((run.folder / "run.json").read_text())["device"].startswith("cuda")


def test_worker_threads_are_refused_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="'threads' runs on the CPU"):
        make_pool(executor="threads")
