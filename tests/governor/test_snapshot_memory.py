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


@pytest.mark.skipif(resident_memory() is None, reason="reads Linux's books")
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.cuda)]
)
def test_a_thousand_snapshots_and_a_hundred_rollbacks_add_no_memory(device: str) -> None:
    """F9: 1,000 snapshots and 100 rollbacks after a warm-up add at most 1 % to the memory of the process and of a GPU,
    since snapshots are in pinned CPU memory."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")

    def memory() -> tuple[float, float]:
        pool.reset(range(HOSTS))
        return resident_memory(), torch.cuda.memory_allocated() if device == "cuda" else 0.0

    pool, wanderer = wanderer_pool(torch.device(device)), RandomValid(0)
    play(pool, wanderer, snapshots=300)
    before = memory()

    assert play(pool, wanderer, snapshots=1000) >= 100, "rollbacks"
    assert all(env.monitor.snapshot.nbytes > 0.25 * 2**20 for env in pool.envs)
    assert all(now <= 1.01 * then for now, then in zip(memory(), before, strict=True))
