"""Memory use does not grow with the number of snapshots and rollbacks."""

import gc
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.envs.governor import GovernorConfig, Verdict
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.hosts import CNN
from esper_lightning.runtime.machine import resident_memory
from esper_lightning.tasks import Digits
from tests.conftest import SMALL

GPU = torch.device("cuda", 0)

EAGER = GovernorConfig(snapshot_every=1, cooldown=0, max_rollbacks=10**6)

HOSTS, HORIZON = 4, 25


def host(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Host whose snapshot takes 0.3 MiB with Adam's momenta, so that a thousand leaked ones are noticed."""
    return CNN(input_shape, outputs, base=16, channels_last=False)


def wanderer_pool(device: torch.device) -> HostPool:
    training = HostTraining(batches=1, batch_size=8, onednn=False)
    config = replace(SMALL, horizon=HORIZON, training=training)
    task = Digits(validation=20, test=20)
    return HostPool(task, task.load(), host, config=config, n_envs=HOSTS, device=device, governor=EAGER)


def play(pool: HostPool, wanderer: RandomValid, snapshots: int) -> int:
    """Play random actions with a snapshot of every host in every tick and a broken weight in every tenth tick.

    Returns the number of rollbacks.
    """
    rollbacks = 0
    for tick in range(snapshots // HOSTS):
        if tick % HORIZON == 0:
            pool.reset(range(HOSTS))
        if tick % 10 == 9:
            for env in pool.envs:
                with torch.no_grad():
                    env.optimizer.param_groups[0]["params"][0].view(-1)[0] = torch.nan
        verdicts = pool.step(wanderer.act(pool)).verdicts
        rollbacks += sum(word.decision is Verdict.ROLL_BACK for word in verdicts)
    gc.collect()
    return rollbacks


@pytest.mark.slow
@pytest.mark.skipif(resident_memory() is None, reason="reads Linux's books")
def test_a_thousand_snapshots_and_a_hundred_rollbacks_add_no_memory() -> None:
    """F9: 1,000 snapshots and 100 rollbacks after a warm-up add at most 1 % to the resident memory of the process."""
    pool, wanderer = wanderer_pool(torch.device("cpu")), RandomValid(0)
    play(pool, wanderer, snapshots=300)
    before = resident_memory()

    rollbacks = play(pool, wanderer, snapshots=1000)

    assert rollbacks >= 100
    assert resident_memory() < 1.01 * before
    assert all(env.monitor.snapshot.nbytes > 0.25 * 2**20 for env in pool.envs)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_snapshots_hold_no_memory_of_the_gpu() -> None:
    """F9: with a GPU, snapshots are in pinned CPU memory, and neither memory grows by more than 1 %."""
    pool, wanderer = wanderer_pool(GPU), RandomValid(0)
    play(pool, wanderer, snapshots=300)
    pool.reset(range(HOSTS))
    process, gpu = resident_memory(), torch.cuda.memory_allocated(GPU)

    rollbacks = play(pool, wanderer, snapshots=1000)
    pool.reset(range(HOSTS))

    assert rollbacks >= 100
    assert torch.cuda.memory_allocated(GPU) <= 1.01 * gpu
    assert resident_memory() < 1.01 * process
