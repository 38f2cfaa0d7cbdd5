"""Diagnostics of a host: the numbers are right, and nothing changes."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import ActionConfig, EnvConfig, HostPool
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.evaluation import inspection
from esper_lightning.evaluation.inspection import credit_fossilized_seeds, layer_gradients
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import Digits, fetch
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


@pytest.mark.parametrize(("host", "executor"), [(tiny_host, "fused"), (tiny_host, "loop"), (restless_host, "loop")])
def test_nothing_is_changed_by_a_look(host: object, executor: str) -> None:
    pool = played(host, executor, ticks=3)
    before, random = pool.state_dict(), torch.get_rng_state()

    layer_gradients(pool, 0)
    credit_fossilized_seeds(pool, 4, 3)

    assert differences(before, pool.state_dict()) == []
    assert torch.equal(random, torch.get_rng_state())


def test_norms_are_those_of_the_next_minibatch() -> None:
    pool = played(tiny_host, ticks=3)
    env = pool.envs[0]
    found = layer_gradients(pool, 0)

    batch = env.draw_batches(pool.data.train.samples).minibatch(0)
    data = fetch(pool.data.train, batch, env.training.augment)
    env.network.train().zero_grad()
    pool.task.measure(env.network(data.inputs), data.targets).loss.mean().backward()
    expected = {
        name: 0.0 if parameter.grad is None else parameter.grad.norm().item()
        for name, parameter in env.network.named_parameters()
    }
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert len(found) > 8 and max(found.values()) > 0.0


def test_kept_seeds_share_what_they_add_on_validation_data() -> None:
    pool = played(tiny_host)
    kept = [i for i, env in enumerate(pool.envs) if any(slot.stage is Stage.FOSSILIZED for slot in env.slots)]
    assert kept
    credits = credit_fossilized_seeds(pool, 4, 1)
    for i in kept:
        env = pool.envs[i]
        bare = 100.0 * pool.variant_accuracies(i, [frozenset()], pool.data.validation).item()
        total = sum(credit.shapley for credit in credits if credit.host == i)
        assert total == pytest.approx(100.0 * env.validated.fossilized.accuracy - bare, abs=1e-3)


def test_a_host_with_more_kept_seeds_than_are_measured_has_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = played(tiny_host)
    assert credit_fossilized_seeds(pool, 4, 1)
    monkeypatch.setattr(inspection, "MAX_SEEDS", 0)
    assert credit_fossilized_seeds(pool, 4, 1) == []


def test_who_has_kept_nothing_has_no_credit() -> None:
    pool = played(tiny_host, ticks=1)

    assert credit_fossilized_seeds(pool, 4, 1) == []


def test_a_dead_seed_is_shown_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = played(tiny_host, ticks=3)
    grown = next(i for i, env in enumerate(pool.envs) if any(slot.occupied for slot in env.slots))
    before = layer_gradients(pool, grown)
    monkeypatch.setattr(HostEnv, "failing_slots", property(lambda env: [slot for slot in env.slots if slot.occupied]))

    after = layer_gradients(pool, grown)

    seeds = [name for name in after if ".seed." in name]
    assert seeds and max(before[name] for name in seeds) > 0.0
    assert all(after[name] == 0.0 for name in seeds)
    assert {name: norm for name, norm in after.items() if name not in seeds} == {
        name: norm for name, norm in before.items() if name not in seeds
    }
