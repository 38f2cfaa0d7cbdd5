"""Diagnostics of a host: the numbers are right, and nothing changes."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import ActionConfig, EnvConfig, HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.evaluation import inspection
from esper_lightning.evaluation.inspection import credit_fossilized_seeds
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.tasks import Digits
from tests.runs import differences, tiny_host


def restless_host(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Host whose forward pass draws random numbers and updates statistics."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), SeedSlot("relu", "image", 4),
        nn.Dropout(0.2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, outputs),
    )  # fmt: skip


def played(host: object, executor: str = "loop", ticks: int = 6) -> HostPool:
    """Return a pool of hosts on which seeds have grown at random."""
    task = Digits()
    config = EnvConfig(
        horizon=ticks,
        executor=executor,
        training=HostTraining(lr=0.02, batches=8),
        lifecycle=LifecycleConfig(training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0),
        actions=ActionConfig(tempos={"FAST": 1}),
    )
    pool = HostPool(task, task.load(), host, config=config, n_envs=4, device=torch.device("cpu"))
    controller = RandomValid(1)
    for _ in range(ticks):
        pool.step(controller.act(pool))
    return pool


@pytest.mark.parametrize(("host", "executor"), [(tiny_host, "fused"), (restless_host, "loop")])
def test_nothing_is_changed_by_a_look(host: object, executor: str) -> None:
    pool = played(host, executor, ticks=3)
    before, random = pool.state_dict(), torch.get_rng_state()

    credit_fossilized_seeds(pool, 4, 3)

    assert differences(before, pool.state_dict()) == []
    assert torch.equal(random, torch.get_rng_state())


def test_kept_seeds_share_what_they_add_on_validation_data(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = played(tiny_host)
    credits = credit_fossilized_seeds(pool, 4, 1)

    assert credits
    for host in {credit.host for credit in credits}:
        bare = 100.0 * pool.variant_accuracies(host, [frozenset()], pool.data.validation).item()
        total = sum(credit.shapley for credit in credits if credit.host == host)
        assert total == pytest.approx(100.0 * pool.envs[host].validated.fossilized.accuracy - bare, abs=1e-3)
    assert credit_fossilized_seeds(played(tiny_host, ticks=1), 4, 1) == [], "nothing has been kept"
    monkeypatch.setattr(inspection, "MAX_SEEDS", 0)
    assert credit_fossilized_seeds(pool, 4, 1) == [], "more have been kept than are measured"
